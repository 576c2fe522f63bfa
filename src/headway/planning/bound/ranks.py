"""Summarizes the computation of a job's ranks as periods: the slowest, the mean, and the fastest rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from headway.job import Job
from headway.planning.bound.periods import Form, Period, periods_of


@dataclass(frozen=True, slots=True)
class Ranks:
    """The computation of ranks in the steps that count, in ns: of the slowest rank, and the mean over ranks.

    ``fastest`` has, for each period, one that demands no more than the period of any rank; it is empty if ranks exchange
    gradients in different steps. ``edges_ns`` is the computation outside of periods (``RankPeriods``).
    """

    slowest_ns: float
    mean_ns: float
    fastest: Sequence[Period]
    edges_ns: float


def ranks_of(job: Job, form: Form) -> Ranks:
    """Summarize the ranks of ``job``. Unrecorded ranks act like recorded ones, perhaps shifted by some steps."""
    computation, timelines = job.steps, job.steps.timelines
    names = sorted(timelines)
    by_chance = min(1.0, job.incidents.slow_factor) if job.incidents.slow_share else 1.0
    alike = Counter(
        (rank if rank in timelines else names[rank % len(names)], computation.factor_of(rank) * by_chance)
        for rank in range(job.world_size)
    )
    scaled = [
        [step.scaled(factor) if factor != 1.0 else step for step in timelines[rank]] for rank, factor in alike
    ]
    any_step_first = job.world_size > len(timelines)
    by_rank = [
        [
            periods_of(steps[first:] + steps[:first], job.model, form)
            for first in (range(len(steps)) if any_step_first else (0,))
        ]
        for steps in scaled
    ]
    computed_ns = [min(rank.computation_ns for rank in rank_steps) for rank_steps in by_rank]
    total_ns = sum(own_ns * count for own_ns, count in zip(computed_ns, alike.values(), strict=True))
    every = [rank for rank_steps in by_rank for rank in rank_steps]
    fastest: list[Period] = []
    if len({len(rank.periods) for rank in every}) == 1:
        fastest = [Period.fastest(periods) for periods in zip(*(rank.periods for rank in every), strict=True)]
        if any_step_first:
            fastest = [Period.fastest([period for rank in every for period in rank.periods])] * len(fastest)
    return Ranks(
        max(computed_ns),
        total_ns / job.world_size,
        fastest,
        min(rank.edges_ns for rank in every),
    )
