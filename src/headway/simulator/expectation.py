"""Estimates the step time to expect of a live job, and its uncertainty, from a replay."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.cluster import Cluster
from headway.graph.build import GraphBuilder

OUTLYING = 2.0  # times the median
POOR_FIT = 0.25
UNMEASURED = 0.25  # error of collectives from data sheets; covers 19 of 20 rows of ten H100 hosts


def unfitted(graph: GraphBuilder[Any]) -> float:
    """The worst relative error of the fitted costs of the graph's collectives."""
    selections = {collective.selection for collective in graph.collectives}
    return max((selection.cost(graph.cluster).fit_error for selection in selections), default=0.0)


def collectives_error(cluster: Cluster) -> float:
    """The relative error of collectives on ``cluster``: that of their fit, or of data sheets if not measured."""
    return max((cost.fit_error for cost in cluster.algorithms.values()), default=0.0) or UNMEASURED


def doubts(steps_ms: Mapping[int, float], missed: float) -> tuple[str, ...]:
    """Warnings that make answers less reliable: outlying recorded steps, and costs with the relative error ``missed``."""
    reasons = []
    median_ms = statistics.median(steps_ms.values())
    longest = max(steps_ms, key=lambda step: steps_ms[step])
    outlying = [step for step, ms in steps_ms.items() if ms > OUTLYING * median_ms]
    if outlying:
        reasons.append(
            f"{len(outlying)} of {len(steps_ms)} recorded steps took more than {OUTLYING:g} times the median "
            f"(step {longest}: {steps_ms[longest]:.1f} ms, median: {median_ms:.1f}). They count in every answer, and "
            "with more workers such steps occur more often. Record more steps, or see headway diagnose for the cause."
        )
    if missed > POOR_FIT:
        reasons.append(
            f"Measured collectives deviate from the costs used here by {missed:.0%} in the median. "
            "Measure them with headway probe, and pass --cluster."
        )
    return tuple(reasons)


# Half-widths that covered nine of ten unrecorded steps, as fractions of the step: the larger ones of two complete runs of
# benchmarks/replay_accuracy.py, by benchmarks/uncertainty.py (see docs/replay.md).
SAME_SHARE = 0.014  # the recorded strategy, with other buckets, on other links or with other workers
OTHER_SHARE = 0.022  # another strategy than the recorded one
BUSY_SHARE = 0.056  # the same, where communication takes cores that training computes on
CROWDED_SHARE = 0.136  # more work at a time for cores that all ranks share
CROWDED = 1.5  # times the recorded work at a time


@dataclass(frozen=True, slots=True)
class Expectation:
    """The expected step time of a job (ms), and that of the recorded job.

    ``uncertainty_ms`` is the half-width of the 90% interval around ``step_ms``.
    """

    recorded_ms: float
    step_ms: float
    uncertainty_ms: float

    @property
    def speedup(self) -> float:
        """The expected speed relative to the recorded job."""
        return self.recorded_ms / self.step_ms

    @property
    def may_gain_nothing(self) -> bool:
        """Whether the recorded step lies below the upper end of the expected interval."""
        return self.recorded_ms <= self.step_ms + self.uncertainty_ms

    @property
    def is_slower(self) -> bool:
        """Whether the recorded step lies below the lower end of the expected interval."""
        return self.recorded_ms < self.step_ms - self.uncertainty_ms

    def like(self, reference: Expectation) -> bool:
        """Whether the two are indistinguishable: they differ by no more than the larger uncertainty."""
        return abs(self.step_ms - reference.step_ms) <= max(self.uncertainty_ms, reference.uncertainty_ms)


def expected_ms(
    replayed_ms: float, *, recorded_ms: float, reproduced_ms: float, same_strategy: bool
) -> float:
    """Correct ``replayed_ms``, the replayed time of a step, to the expected time of a live step.

    ``reproduced_ms`` is the replay of the recorded step. Its relative error is assumed to be the same for other buckets
    and other links under the recorded strategy. Another strategy communicates differently: a replay that is too slow
    for the recorded strategy need not be too slow for that one, and correcting for it would claim too large a gain. If
    replay is too fast, it misses something, which it would miss for the other strategy too.
    """
    ratio = recorded_ms / reproduced_ms
    return replayed_ms * (ratio if same_strategy else max(1.0, ratio))


def crowded(
    workers: int, step_ms: float, recorded_workers: int, recorded_ms: float, cores: int | None
) -> bool:
    """Whether the ``cores`` that all ranks share are far more loaded than during recording.

    ``cores`` is None if hosts do not share cores.
    """
    if cores is None or workers <= cores:
        return False
    return workers / step_ms > CROWDED * recorded_workers / recorded_ms


def share_of_replay(*, same_strategy: bool, busy: bool, crowded: bool) -> float:
    """The relative error of replay itself.

    ``busy``: communication uses cores that training computes on. ``crowded``: see the function of that name.
    """
    if crowded:
        return CROWDED_SHARE
    if same_strategy:
        return SAME_SHARE
    return BUSY_SHARE if busy else OTHER_SHARE


def half_width_ms(
    step_ms: float,
    *,
    recorded_error_ms: float,
    reproduction_error: float,
    model_share: float,
    links_ms: float = 0.0,
) -> float:
    """The half-width (ms) of the 90% interval of an expected step.

    ``recorded_error_ms`` is the standard error of the recorded step, ``reproduction_error`` the relative error of its
    replay, ``model_share`` one of this module's shares. ``links_ms`` is the error of the fitted links in the time spent
    waiting: ``model_share`` includes the error of links that fit well, so only the larger of the two counts.
    """
    model_ms = max(model_share * step_ms, links_ms)
    return math.hypot(2 * recorded_error_ms, reproduction_error * step_ms, model_ms)
