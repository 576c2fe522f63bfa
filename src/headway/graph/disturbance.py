"""Communication that slows computation down, because both work on the same cores."""

from __future__ import annotations

from typing import Any

import numpy as np

from headway.graph.build import GraphBuilder
from headway.intervals import Intervals
from headway.simulation.engine import PlayedTimes, play
from headway.simulation.operations import OperationGraph

ROUNDS = 4


def play_disturbed(graph: GraphBuilder[Any], dataflow: OperationGraph, slowdown: float) -> PlayedTimes:
    """Simulate ``dataflow``, stretching computation by ``slowdown`` while it overlaps its rank's collectives.

    Parts of a step that the strategy itself slows down are stretched by ``graph.slowdowns``. How long they overlap
    depends on when operations run and the other way round, so both are found in a few rounds: a single one would give
    other answers, as what comes later changes what came before. Graphs with decisions are refused (ValueError).
    """
    played = play(dataflow)
    slowdowns = np.array([graph.slowdowns.get(span.part, slowdown) for span in graph.spans])
    if not slowdowns.any():
        return played
    operations = np.array([span.operation for span in graph.spans], dtype=np.int64)
    undisturbed_ns = dataflow.duration_ns[operations]
    for _ in range(ROUNDS):
        overlaps = _overlaps(graph, played)
        duration_ns = np.round(undisturbed_ns * (1 + slowdowns * overlaps)).astype(np.int64)
        played = play(dataflow.with_durations(operations, duration_ns))
    return played


def _overlaps(graph: GraphBuilder[Any], played: PlayedTimes) -> np.ndarray:
    spans: list[list[tuple[int, int]]] = [[] for _ in range(graph.ranks)]
    for each in graph.communications:
        asked_by_all_ns = int(played.end_ns[each.begins].max())
        for rank, end_ns in zip(each.members, played.end_ns[each.ends].tolist(), strict=True):
            spans[rank].append((asked_by_all_ns, end_ns))
    in_flight = [Intervals(each) for each in spans]
    starts, ends = played.start_ns.tolist(), played.end_ns.tolist()
    return np.array(
        [in_flight[span.rank].share_of(starts[span.operation], ends[span.operation]) for span in graph.spans]
    )
