"""Replicated pipelines: each trains on part of the batch, and replicas of a stage reduce its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from headway.scheduling.buckets import BucketSchedule
from headway.scheduling.pipeline.schedule import PipelineSchedule


@dataclass(frozen=True)
class ReplicatedSchedule:
    """Several pipelines with the same schedule: job rank ``pipelines[p][r]`` acts as rank ``r`` of pipeline ``p``.

    Replicas of stage ``s`` reduce gradients in ``buckets[s]``, from its last backward on, by the strategy
    ``reduced_by``. Raises ValueError unless every rank has exactly one position and every stage has buckets.
    """

    pipeline: PipelineSchedule
    pipelines: tuple[tuple[int, ...], ...]
    buckets: tuple[BucketSchedule, ...]
    reduced_by: str

    def __post_init__(self) -> None:
        ranks = sorted(rank for pipeline in self.pipelines for rank in pipeline)
        if ranks != list(range(len(ranks))):
            raise ValueError("a rank is in no pipeline, or in several")
        if any(len(members) != len(self.pipeline.ranks) for members in self.pipelines):
            raise ValueError(f"every pipeline has {len(self.pipeline.ranks)} ranks")
        if len(self.buckets) != self.pipeline.stages:
            raise ValueError(f"buckets of {len(self.buckets)} stages, of {self.pipeline.stages}")

    @cached_property
    def place_of(self) -> dict[int, tuple[int, int]]:
        """For each job rank, its pipeline and its rank in that."""
        return {rank: (p, r) for p, pipeline in enumerate(self.pipelines) for r, rank in enumerate(pipeline)}

    def replicas_of(self, stage: int) -> tuple[int, ...]:
        """The ranks that have ``stage``, one of each pipeline."""
        at = self.pipeline.rank_of_stage[stage]
        return tuple(pipeline[at] for pipeline in self.pipelines)

    @property
    def stages(self) -> int:
        """The number of stages of each pipeline."""
        return self.pipeline.stages

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of each pipeline per step."""
        return self.pipeline.micro_batches

    @property
    def parts(self) -> str:
        """The parts of a step, in words."""
        return f"{len(self.pipelines)} x {self.pipeline.parts}"

    @property
    def collectives(self) -> int:
        """The number of messages and collectives per step: fewer mean less risk."""
        reduced = sum(len(bucket.buckets) for bucket in self.buckets)
        return self.pipeline.collectives * len(self.pipelines) + reduced
