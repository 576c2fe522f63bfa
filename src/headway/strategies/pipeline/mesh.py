"""Decides about replicated pipelines: the order within each, and how replicas of a stage reduce gradients."""

from __future__ import annotations

from typing import ClassVar, Self

from headway.compression.cast import Cast
from headway.compression.codec import Codec
from headway.errors import PlanError
from headway.job import Job
from headway.scheduling.mesh import groups_along
from headway.scheduling.pipeline.replicated import ReplicatedSchedule
from headway.strategies.adaptive.policy import AdaptiveStrategy
from headway.strategies.base import DATA, DATA_INSIDE, PIPELINE, Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.pipeline.policy import RECORDED, PipelineStrategy, check_whole_backwards


class MeshStrategy(Strategy):
    """A pipeline strategy and a data-parallel strategy for the two dimensions of a mesh.

    A plan file does not name it: it has one strategy under each dimension.
    """

    name: ClassVar[str] = "mesh"
    dimension: ClassVar[str] = PIPELINE

    pipeline: PipelineStrategy
    """The order of every pipeline."""
    data: DistributedDataParallelStrategy | DecoupledStrategy | AdaptiveStrategy
    """How the replicas of a stage reduce its gradients, from its last backward on."""

    def decide(self, job: Job) -> ReplicatedSchedule:
        """The order of every rank, and the buckets of every stage.

        Raises PlanError if ``job`` has no mesh of those two dimensions or another number of stages; for an order that
        splits backward passes, whose weight gradients DDP would not see; for codecs other than casts; and for the
        decoupled all-reduce in a recorded order or with decisions during training.
        """
        self._check_data()
        mesh = dict(job.mesh)
        if set(mesh) - {DATA_INSIDE} != {DATA, PIPELINE}:
            raise PlanError(
                "replicated pipelines need a mesh with both dimensions", got=f"{mesh or 'no mesh'}",
                expected=f"the dimensions {PIPELINE} and {DATA}",
            )  # fmt: skip
        pipeline = self.pipeline.decide(job)
        if len(pipeline.ranks) != mesh[PIPELINE]:
            raise PlanError(
                "the mesh has the wrong number of stages", got=f"{mesh[PIPELINE]}",
                expected=f"{len(pipeline.ranks)}",
            )  # fmt: skip
        check_whole_backwards(pipeline, self.pipeline)
        pipelines = groups_along(mesh, PIPELINE)
        buckets = tuple(self.data.decide(Job.of(stage, len(pipelines))) for stage in job.stages)
        return ReplicatedSchedule(pipeline, pipelines, buckets, self.data.name)

    def _check_data(self) -> None:
        data = self.data
        if isinstance(data, DecoupledStrategy | AdaptiveStrategy):
            if self.pipeline.order == RECORDED or data.decides_while_training:
                raise PlanError(
                    "cannot replay pipelines that use this decoupled all-reduce; they can only train",
                    got=self.describe(), expected="an order other than recorded, without tune and adapt",
                )  # fmt: skip
        elif any(isinstance(transform, Codec) and not isinstance(transform, Cast) for transform in data.wire):
            raise PlanError(
                "cannot replay pipelines with compressed gradients; they can only train",
                got=data.describe(), expected="ddp along data with uncompressed or cast gradients",
            )  # fmt: skip

    def spelled_out(self, job: Job) -> Self:
        """The same with the recorded number of micro-batches."""
        return self.model_copy(update={"pipeline": self.pipeline.spelled_out(job)})

    def beside(self, alternative: Strategy) -> Strategy:
        """The same replicas under another pipeline order."""
        is_order = isinstance(alternative, PipelineStrategy)
        return self.model_copy(update={"pipeline": alternative}) if is_order else alternative

    @property
    def family(self) -> str:
        """The families of both."""
        return f"{self.pipeline.family} x {self.data.family}"

    @property
    def changes_training(self) -> str:
        """What the data-parallel strategy changes."""
        return self.data.changes_training

    @property
    def permission(self) -> str:
        """The permission that this needs."""
        return self.data.permission

    @property
    def permissions(self) -> frozenset[str]:
        """All permissions that it needs."""
        return self.data.permissions

    def describe(self) -> str:
        """Describe both."""
        return f"{self.pipeline.describe()} x {self.data.describe()}"
