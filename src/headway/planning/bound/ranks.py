"""What the ranks of a job compute, as periods: of each by itself, and of one that is as fast as the fastest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from headway.job import Job
from headway.planning.bound.periods import Form, Period, periods_of


@dataclass(frozen=True, slots=True)
class Ranks:
    """What ranks compute in the steps that count, in nanoseconds: the slowest of them, and the mean over all.

    ``fastest`` has for each period one that asks no more than that of any rank; it is empty where ranks exchange
    gradients in different steps. ``edges_ns`` is what the steps have besides their periods (``RankPeriods``).
    """

    slowest_ns: float
    mean_ns: float
    fastest: Sequence[Period]
    edges_ns: float


def ranks_of(job: Job, form: Form) -> Ranks:
    """The ranks of ``job``. Those that were not recorded do what others do, maybe in another step."""
    computation, known = job.steps, job.steps.timelines
    names = sorted(known)
    by_chance = min(1.0, job.incidents.slow_factor) if job.incidents.slow_share else 1.0
    alike = Counter(
        (rank if rank in known else names[rank % len(names)], computation.factor_of(rank) * by_chance)
        for rank in range(job.world_size)
    )
    scaled = [
        [step.scaled(factor) if factor != 1.0 else step for step in known[rank]] for rank, factor in alike
    ]
    any_step_first = job.world_size > len(known)
    each = [
        [
            periods_of(steps[first:] + steps[:first], job.model, form)
            for first in (range(len(steps)) if any_step_first else (0,))
        ]
        for steps in scaled
    ]
    computed_ns = [min(one.computation_ns for one in own) for own in each]
    total_ns = sum(own_ns * count for own_ns, count in zip(computed_ns, alike.values(), strict=True))
    every = [one for own in each for one in own]
    fastest: list[Period] = []
    if len({len(one.periods) for one in every}) == 1:
        fastest = [Period.fastest(periods) for periods in zip(*(one.periods for one in every), strict=True)]
        if any_step_first:
            fastest = [Period.fastest([period for one in every for period in one.periods])] * len(fastest)
    return Ranks(max(computed_ns), total_ns / job.world_size, fastest, min(one.edges_ns for one in every))
