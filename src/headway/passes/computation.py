"""What passes need of a job's computation, and how they give it another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from headway.errors import UnsupportedError
from headway.graph.computation import Computation, RankTimelines
from headway.graph.timeline import Timeline
from headway.job import Job
from headway.model import ModelSpec


def whole_model(job: Job, what: str) -> ModelSpec:
    """The model that every rank of ``job`` trains. Raises UnsupportedError for stages of a pipeline."""
    if len(job.stages) > 1:
        raise UnsupportedError(
            f"{what} is not predicted for a model that is cut into stages",
            got=f"{len(job.stages)} stages", expected="a model that every rank trains as a whole",
            fix="Leave the pass out of the plan.",
        )  # fmt: skip
    return job.model


def with_timelines(job: Job, change: Callable[[Timeline], Timeline]) -> Job:
    """``job`` with every step of every rank changed so, also where names of computation are scaled later."""
    if job.computation is None:
        return job
    return replace(job, computation=_changed(job.computation, change))


def _changed(computation: Computation, change: Callable[[Timeline], Timeline]) -> Computation:
    def all_of(timelines: RankTimelines) -> dict[int, tuple[Timeline, ...]]:
        return {rank: tuple(map(change, steps)) for rank, steps in timelines.items()}

    again = computation.with_factors
    if again is None:
        return replace(computation, timelines=all_of(computation.timelines))

    def with_factors(factors: Mapping[str, float]) -> RankTimelines:
        return all_of(again(factors))

    return replace(computation, timelines=all_of(computation.timelines), with_factors=with_factors)
