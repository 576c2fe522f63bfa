"""Plays a graph with computation slowed down by communication and codecs that share its cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headway.graph.build import GraphBuilder
from headway.intervals import Intervals
from headway.simulation.building import OperationGraph
from headway.simulation.engine import PlayedTimes, play

ROUNDS = 4


def play_disturbed(graph: GraphBuilder[Any], dataflow: OperationGraph, slowdown: float) -> PlayedTimes:
    """Simulate ``dataflow``, stretching computation by ``slowdown`` while it overlaps its rank's collectives.

    ``graph.slowdowns`` replaces ``slowdown`` for some parts; work off the main thread stretches all parts by its own
    slowdown. Overlaps and times depend on each other, so both are computed in ROUNDS iterations. Raises ValueError for
    graphs with decisions.
    """
    played = play(dataflow)
    slowdowns = np.array([graph.slowdowns.get(span.part, slowdown) for span in graph.spans])
    if not slowdowns.any() and not any(work.slowdown for work in graph.works):
        return played
    operations = np.array([span.operation for span in graph.spans], dtype=np.int64)
    undisturbed_ns = dataflow.duration_ns[operations]
    for _ in range(ROUNDS):
        stretched = 1 + slowdowns * _overlaps(graph, played) + _slowed_by_works(graph, played)
        duration_ns = np.round(undisturbed_ns * stretched).astype(np.int64)
        played = play(dataflow.with_durations(operations, duration_ns))
    return played


def _overlaps(graph: GraphBuilder[Any], played: PlayedTimes) -> np.ndarray:
    spans: list[list[tuple[int, int]]] = [[] for _ in range(graph.ranks)]
    for communication in graph.communications:
        asked_by_all_ns = int(played.end_ns[communication.begins].max())
        for rank, end_ns in zip(
            communication.members, played.end_ns[communication.ends].tolist(), strict=True
        ):
            spans[rank].append((asked_by_all_ns, end_ns))
    return _shares_under(spans, graph, played)


def _slowed_by_works(graph: GraphBuilder[Any], played: PlayedTimes) -> np.ndarray:
    """The relative slowdown of each computation by work off the main thread."""
    total = np.zeros(len(graph.spans))
    starts, ends = played.start_ns.tolist(), played.end_ns.tolist()
    for slowdown in {work.slowdown for work in graph.works if work.slowdown}:
        times: list[list[tuple[int, int]]] = [[] for _ in range(graph.ranks)]
        for work in graph.works:
            if work.slowdown == slowdown:
                times[work.rank].append((starts[work.operation], ends[work.operation]))
        total += slowdown * _shares_under(times, graph, played)
    return total


def _shares_under(
    times: Sequence[Sequence[tuple[int, int]]], graph: GraphBuilder[Any], played: PlayedTimes
) -> np.ndarray:
    """The fraction of each computation that lies within ``times`` of its rank."""
    of_rank = [Intervals(time_) for time_ in times]
    starts, ends = played.start_ns.tolist(), played.end_ns.tolist()
    return np.array(
        [of_rank[span.rank].share_of(starts[span.operation], ends[span.operation]) for span in graph.spans]
    )
