"""Which orders of a pipeline are worth a replay: groups of every useful size, and the known others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway.job import Job
from headway.scheduling.mesh import groups_along
from headway.scheduling.pipeline.schedule import Pass
from headway.strategies.base import PIPELINE
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.pipeline.stage_times import INPUT_SHARE, StageTimes, micro_batches


def candidates(job: Job) -> Iterator[PipelineStrategy]:
    """Orders for the micro-batches that were recorded; none for a model in one piece."""
    count = micro_batches(job.steps) if len(job.stages) > 1 else 0
    if not count:
        return
    if len(job.stages) > (ranks := dict(job.mesh).get(PIPELINE, job.world_size)):
        yield from _looped(job, ranks, count)
        return
    yield PipelineStrategy(micro_batches=count)
    for size in group_sizes(count):
        yield PipelineStrategy(micro_batches=count, order="kfkb", group_size=size)
    yield PipelineStrategy(micro_batches=count, order="eager-1f1b")
    if not job.mesh:  # the replicas of a stage reduce gradients in whole backwards
        yield PipelineStrategy(micro_batches=count, order="zero-bubble")


def _looped(job: Job, ranks: int, micro_batches: int) -> Iterator[PipelineStrategy]:
    """Orders of several stages a rank, where these lie as the orders have them."""
    if any(
        action.stage % ranks != rank
        for rank, own in job.steps.timelines.items()
        for action in StageTimes.of(own[0]).passes_ns
    ):
        return
    if micro_batches % ranks == 0:
        yield PipelineStrategy(micro_batches=micro_batches, order="interleaved")
    yield PipelineStrategy(micro_batches=micro_batches, order="looped")


def group_sizes(micro_batches: int) -> list[int]:
    """Sizes of groups of more than one, but for those that make no fewer groups than a smaller one, and hold more."""
    smallest: dict[int, int] = {}
    for size in range(2, micro_batches + 1):
        smallest.setdefault(-(-micro_batches // size), size)
    return list(smallest.values())


def step_bound_ms(job: Job) -> float:
    """What no order of these stages can beat, as the mean of the recorded steps, if transfers take no time at all."""
    ranks = tuple(sorted(job.steps.timelines))
    pipelines = groups_along(job.mesh, PIPELINE) if job.mesh else (ranks,)
    return max(_pipeline_bound_ms(job, own) for own in pipelines)


def busiest_rank_ms(job: Job) -> float:
    """What no order can beat wherever stages are: the work of the rank that has most of it."""
    return max(_pipeline_bound_ms(job, (rank,)) for rank in job.steps.timelines)


def _pipeline_bound_ms(job: Job, ranks: Sequence[int]) -> float:
    """The same of one pipeline of several, whose stages are on ``ranks`` in order."""
    factors = [job.steps.factor_of(rank) for rank in ranks]
    steps = list(zip(*(job.steps.timelines[rank] for rank in ranks), strict=False))
    bounds_ns = [_bound_ns([StageTimes.of(timeline) for timeline in each], factors) for each in steps]
    return sum(bounds_ns) / len(bounds_ns) / 1e6 if bounds_ns else 0.0


def _bound_ns(stages: Sequence[StageTimes], factors: Sequence[float]) -> float:
    """A rank does its own work; and between its last backward of a step and its first forward of the next, those of the
    stages before it come. Of backwards the gradients of inputs alone, for weights may be put off.
    """
    bound_ns = others_ns = 0.0
    for times, factor in zip(stages, factors, strict=True):
        outside_ns = factor * sum(block.duration_ns for block in (*times.before, *times.after))
        forwards = [factor * ns for action, ns in times.passes_ns.items() if action.kind is Pass.FORWARD]
        backwards = [factor * ns for action, ns in times.passes_ns.items() if action.kind is Pass.BACKWARD]
        all_ns = sum(forwards) + sum(backwards) + outside_ns
        needed_ns = sum(forwards) + sum(backwards) * INPUT_SHARE + others_ns
        bound_ns = max(bound_ns, all_ns, needed_ns)
        others_ns += min(forwards, default=0) + min(backwards, default=0) * INPUT_SHARE
    return bound_ns
