"""Pipelines side by side as a decision: an order within each, and how the replicas of a stage add up gradients."""

from __future__ import annotations

from typing import ClassVar, Self

from headway.compression.cast import Cast
from headway.compression.codec import Codec
from headway.errors import PlanError
from headway.job import Job
from headway.scheduling.mesh import groups_along
from headway.scheduling.pipeline.replicated import ReplicatedSchedule
from headway.strategies.base import DATA, DATA_INSIDE, PIPELINE, Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.pipeline.policy import RECORDED, PipelineStrategy, check_whole_backwards


class MeshStrategy(Strategy):
    """A strategy for each of the two dimensions of a job's mesh: stages, and replicas of each.

    It is no strategy of a plan file by itself: that has one under each dimension.
    """

    name: ClassVar[str] = "mesh"
    dimension: ClassVar[str] = PIPELINE

    pipeline: PipelineStrategy
    """The order of every pipeline."""
    data: DistributedDataParallelStrategy | DecoupledStrategy
    """What the replicas of a stage do about its gradients, from its last backward on."""

    def decide(self, job: Job) -> ReplicatedSchedule:
        """The order of every rank, and the buckets of every stage.

        Raises PlanError where ``job`` has no mesh of those two dimensions, where its model is not cut into as many
        stages, for an order that halves backwards, in which the gradients of weights would not be seen, for codecs that
        do more than cast, and for the decoupled all-reduce in the order of a recording, which was of another strategy,
        or where it is decided while the job trains.
        """
        self._check_data()
        mesh = dict(job.mesh)
        if set(mesh) - {DATA_INSIDE} != {DATA, PIPELINE}:
            raise PlanError(
                "pipelines side by side need a mesh of stages and replicas", got=f"{mesh or 'no mesh'}",
                expected=f"the dimensions {PIPELINE} and {DATA}",
            )  # fmt: skip
        pipeline = self.pipeline.decide(job)
        if len(pipeline.ranks) != mesh[PIPELINE]:
            raise PlanError(
                "the mesh is for another number of stages", got=f"{mesh[PIPELINE]}",
                expected=f"{len(pipeline.ranks)}",
            )  # fmt: skip
        check_whole_backwards(pipeline, self.pipeline)
        pipelines = groups_along(mesh, PIPELINE)
        buckets = tuple(self.data.decide(Job.of(stage, len(pipelines))) for stage in job.stages)
        return ReplicatedSchedule(pipeline, pipelines, buckets, self.data.name)

    def _check_data(self) -> None:
        data = self.data
        if isinstance(data, DecoupledStrategy):
            if self.pipeline.order == RECORDED or data.decides_while_training:
                raise PlanError(
                    "pipelines with this decoupled all-reduce within stages can be trained, not replayed",
                    got=self.describe(), expected="an order other than the recorded one, and neither tune nor adapt",
                )  # fmt: skip
        elif any(isinstance(transform, Codec) and not isinstance(transform, Cast) for transform in data.wire):
            raise PlanError(
                "pipelines with compressed gradients within stages can be trained, not replayed",
                got=data.describe(), expected="ddp along data that sends gradients as they are, or cast",
            )  # fmt: skip

    def spelled_out(self, job: Job) -> Self:
        """The same with the number of micro-batches that were recorded."""
        return self.model_copy(update={"pipeline": self.pipeline.spelled_out(job)})

    def beside(self, other: Strategy) -> Strategy:
        """Another order for the same replicas."""
        return self.model_copy(update={"pipeline": other}) if isinstance(other, PipelineStrategy) else other

    @property
    def family(self) -> str:
        """That of both."""
        return f"{self.pipeline.family} x {self.data.family}"

    @property
    def changes_training(self) -> str:
        """What the replicas of a stage change."""
        return self.data.changes_training

    @property
    def permission(self) -> str:
        """What that needs."""
        return self.data.permission

    @property
    def permissions(self) -> frozenset[str]:
        """All that it needs."""
        return self.data.permissions

    def describe(self) -> str:
        """Say both."""
        return f"{self.pipeline.describe()} x {self.data.describe()}"
