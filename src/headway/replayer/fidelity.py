"""Whether a replay would communicate what was recorded: a replay of something else predicts nothing."""

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
"""A recording whose replay is off by more than this share cannot rank plans: most gains are smaller."""


def is_reproduced(reproduction_error: float) -> bool:
    """Whether a replay that is off by this share of the recorded step is close enough to rank plans by."""
    return abs(reproduction_error) <= MOST_REPRODUCTION_ERROR


def check_fidelity(trace: Trace, strategy: Strategy, job: Job) -> None:
    """Compare the first rank's recorded collectives of gradients with what ``strategy`` launches over its timelines.

    Counts and bytes must agree in the median step. A strategy that gathers under the next forward finishes some of a
    step's collectives in the next step, and one that repeats after several steps was recorded from any of them on, so
    there the entire recording must agree, to within one step or such a period. Raises
    TraceError if they differ, or if ranks wait for the script's own messages. A single rank does not communicate and is
    not checked.
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
            "replay cannot reproduce this recording: its collectives of gradients are not those of its strategy",
            got=f"{got[0]:g} collectives of {got[1]:.0f} bytes a step",
            expected=f"{expected[0]:g} of {expected[1]:.0f} bytes for {strategy.describe()}",
            fix="Record one model, without a communication hook.",
        )


def _recorded(events: Events, step: int) -> tuple[int, int]:
    rows = [row for row in events.of_step(step) if row.kind == Kind.COLLECTIVE and row.bucket >= 0]
    return len(rows), sum(row.size_bytes for row in rows)
