"""What the steps of each rank of a job take by themselves, where ranks communicate nothing within a step."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from headway.job import Job
from headway.strategies.partial_all_reduce.cosimulation import parts_of


def steps_alone_ns(job: Job, without: Collection[str] = ()) -> Sequence[Sequence[int]]:
    """The time of each step of each rank, without parts of the kinds ``without``.

    Ranks that were not recorded take the steps of those that were.
    """
    timelines = job.steps.timelines
    names = sorted(timelines)
    found = []
    for rank in range(job.world_size):
        own = timelines.get(rank) or timelines[names[rank % len(names)]]
        factor = job.steps.factor_of(rank)
        found.append(
            [
                max(1, round(factor * sum(ns for part, ns in parts_of(each) if part not in without)))
                for each in own
            ]
        )
    return found
