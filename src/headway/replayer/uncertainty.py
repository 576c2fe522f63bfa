"""What is known of the errors of what an answer was made from."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from headway.cluster import Cluster
from headway.graph.build import GraphBuilder

OUTLYING = 2.0  # times the median
POOR_FIT = 0.25
UNMEASURED = 0.25  # how far collectives of data sheets are off; 19 of 20 rows of ten H100 hosts lie within it


def unfitted(graph: GraphBuilder[Any]) -> float:
    """By how much what was measured of the graph's collectives is off their costs, at worst; a share."""
    selections = {collective.selection for collective in graph.collectives}
    return max((each.cost(graph.cluster).fit_error for each in selections), default=0.0)


def collectives_error(cluster: Cluster) -> float:
    """By which share collectives on ``cluster`` may be off: as they were measured, else as data sheets are."""
    return max((cost.fit_error for cost in cluster.algorithms.values()), default=0.0) or UNMEASURED


def doubts(steps_ms: Mapping[int, float], missed: float) -> tuple[str, ...]:
    """What makes answers less reliable: recorded steps that stand out, costs that are off by the share ``missed``."""
    said = []
    median_ms = statistics.median(steps_ms.values())
    longest = max(steps_ms, key=lambda step: steps_ms[step])
    outlying = [step for step, ms in steps_ms.items() if ms > OUTLYING * median_ms]
    if outlying:
        said.append(
            f"{len(outlying)} of {len(steps_ms)} recorded steps took more than {OUTLYING:g} times the median "
            f"(step {longest}: {steps_ms[longest]:.1f} ms, median: {median_ms:.1f}). They count in every answer, and "
            "with more workers such steps occur more often. Record more steps, or see headway diagnose for the cause."
        )
    if missed > POOR_FIT:
        said.append(
            f"Measured collectives deviate from the costs used here by {missed:.0%} in the median. "
            "Measure them with headway probe, and pass --cluster."
        )
    return tuple(said)
