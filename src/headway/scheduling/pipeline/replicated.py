"""Pipelines side by side: each trains on a part of the batch, and the replicas of a stage add up its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from headway.scheduling.buckets import BucketSchedule
from headway.scheduling.pipeline.schedule import PipelineSchedule


@dataclass(frozen=True)
class ReplicatedSchedule:
    """``pipelines[p][r]`` is the rank of the job that does what rank ``r`` of ``pipeline`` does, in pipeline ``p``.

    ``buckets[s]`` are those in which the replicas of stage ``s`` add up gradients, from its last backward on, as the
    strategy named ``reduced_by`` does. Raises ValueError unless every rank is in one place of one pipeline, and every
    stage has its buckets.
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
        """Of each rank of the job, its pipeline and its rank in that."""
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
        """How many micro-batches each pipeline has in a step."""
        return self.pipeline.micro_batches

    @property
    def parts(self) -> str:
        """What it cuts a step into, in words."""
        return f"{len(self.pipelines)} x {self.pipeline.parts}"

    @property
    def collectives(self) -> int:
        """How many messages and collectives a step has: fewer are less risk."""
        reduced = sum(len(bucket.buckets) for bucket in self.buckets)
        return self.pipeline.collectives * len(self.pipelines) + reduced
