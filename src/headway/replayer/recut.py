"""The recorded job under a plan that cuts its model otherwise: in one piece as it was, or with other stages."""

from __future__ import annotations

from collections.abc import Mapping

from headway.errors import PlanError
from headway.job import Job
from headway.replayer.cut_recording import CutRecording, why_not_cut
from headway.strategies.base import Strategy
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.pipeline.stage_links import StageLinks, why_not_split
from headway.trace.format import Trace

CUT_SHARE = 0.25
"""By what share of its step a job whose model was recorded in one piece may be off: times of micro-batches are taken to
be in proportion to their size. It is not calibrated. What calls themselves cost comes on top (``slower``)."""
SPLIT_SHARE = 0.1
"""The same where modules of recorded stages are split otherwise."""


def stage_links(trace: Trace, job: Job) -> StageLinks | str:
    """The modules of recorded stages, or why nothing is known of them."""
    replicas = job.world_size // len(job.stages) if job.mesh else 1
    why = why_not_split(trace.stages, stages_a_rank=trace.stages_a_rank, replicas=replicas)
    return why or StageLinks(trace.stages, job.boundary_bytes)


def names_stages(strategy: Strategy) -> bool:
    """Whether it says at which modules stages begin."""
    pipeline = strategy.pipeline if isinstance(strategy, MeshStrategy) else strategy
    return isinstance(pipeline, PipelineStrategy) and bool(pipeline.split_points)


def job_under(
    trace: Trace, job: Job, recorded: Strategy, asked: Strategy, mesh: Mapping[str, int] | None = None
) -> tuple[Job, Job | None]:
    """``job`` with the stages that ``asked`` names by ``split_points``; as it is where it names none.

    With it comes the job that it may be at worst, where times of micro-batches are not known. ``mesh`` is that of the
    plan. Raises PlanError where the recording does not say what that would be.
    """
    pipeline, before = (
        each.pipeline if isinstance(each, MeshStrategy) else each for each in (asked, recorded)
    )
    if not isinstance(pipeline, PipelineStrategy) or not pipeline.split_points:
        return job, None
    if isinstance(before, PipelineStrategy) and before.split_points == pipeline.split_points:
        return job, None
    if len(job.stages) == 1:
        if why := why_not_cut(trace, job, recorded):
            raise PlanError(
                "the recorded model cannot be replayed in stages", got=why,
                expected="a recording of modules that forward calls one after the other",
            )  # fmt: skip
        return CutRecording(trace, job).by_hand(pipeline.split_points, pipeline.micro_batches, mesh or {})
    links = stage_links(trace, job)
    if isinstance(links, str):
        raise PlanError(
            "the recorded stages cannot be replayed with other split_points", got=links,
            fix="Leave split_points out: stages are then as recorded.",
        )  # fmt: skip
    if (ends := links.ends_at(pipeline.split_points)) is None:
        raise PlanError(
            "the recorded stages cannot be split at the plan's split_points", got=", ".join(pipeline.split_points),
            expected=f"{len(job.stages) - 1} of their modules, in order"
            + ("" if links.named else "; modules of different stages have the same names, so that none can be told"),
        )  # fmt: skip
    return (job if ends == links.ends else links.resplit(job, ends)), None
