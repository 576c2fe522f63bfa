"""Checks that a replay communicates what was recorded; otherwise its predictions mean nothing."""

from __future__ import annotations

import numpy as np

from headway.errors import TraceError
from headway.graph.build import GraphBuilder
from headway.graph.step_layout import lay_out_ranks
from headway.job import Job
from headway.plugins import asking
from headway.replayer.incomplete import check_messages
from headway.strategies.base import Strategy, decided
from headway.strategies.registry import plugin_of
from headway.trace.events import Events, Kind
from headway.trace.format import Trace

MOST_REPRODUCTION_ERROR = 0.10
"""A replay that is off by more than this share cannot rank plans, because most gains are smaller."""


def is_reproduced(reproduction_error: float) -> bool:
    """Whether a replay with this relative error is close enough to rank plans."""
    return abs(reproduction_error) <= MOST_REPRODUCTION_ERROR


def check_fidelity(trace: Trace, strategy: Strategy, job: Job) -> None:
    """Compare the recorded gradient collectives of the first rank with those that ``strategy`` launches in replay.

    Counts and bytes must agree in the median step. Some strategies finish a step's collectives in the next step, or
    repeat only after several steps; for them the whole recording must agree, to within one such period. Raises
    TraceError if they differ, or if ranks wait for messages of the script. A single rank is not checked.
    """
    if trace.world_size == 1:
        return
    check_messages(trace)
    first = min(job.steps.timelines)
    timelines = job.steps.timelines[first]
    plugin = plugin_of(strategy)
    graph = GraphBuilder(job.on, decided(strategy, job))
    with asking("strategy", strategy):
        lay_out_ranks(graph, plugin.reactions(graph, job, strategy), [timelines])
    launched = np.zeros((len(timelines), 2))
    for collective in graph.collectives:
        if collective.bucket >= 0:
            launched[collective.step] += (1, collective.size_bytes)
    recorded = np.array([_recorded(trace.events[first], timeline.step) for timeline in timelines])
    if plugin.carries_over or strategy.repeats_after > 1:
        sums = np.cumsum(np.vstack([np.zeros((strategy.repeats_after, 2)), launched]), axis=0)
        most = (sums[strategy.repeats_after :] - sums[: -strategy.repeats_after]).max(axis=0)
        off = np.abs((recorded - launched).sum(axis=0)) > most
    else:
        off = np.median(recorded - launched, axis=0) != 0
    if off.any():
        got, expected = np.median(recorded, axis=0), np.median(launched, axis=0)
        raise TraceError(
            "replay cannot reproduce this recording: its gradient collectives do not match its strategy",
            got=f"{got[0]:g} collectives with {got[1]:.0f} bytes per step",
            expected=f"{expected[0]:g} with {expected[1]:.0f} bytes for {strategy.describe()}",
            fix="Record a single model, without a communication hook.",
        )


def _recorded(events: Events, step: int) -> tuple[int, int]:
    rows = [row for row in events.of_step(step) if row.kind == Kind.COLLECTIVE and row.bucket >= 0]
    return len(rows), sum(row.size_bytes for row in rows)
