"""The device mesh of a recorded job that trains several pipelines side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from headway.errors import TraceError
from headway.scheduling.mesh import groups_along
from headway.strategies.base import DATA, PIPELINE, Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.trace.events import Kind
from headway.trace.format import Trace

NO_MESH: Mapping[str, int] = MappingProxyType({})


def recorded_mesh(trace: Trace) -> Mapping[str, int]:
    """Stages and replicas of each, the outermost dimension first; empty for a job without both.

    Raises TraceError where ranks have stages otherwise than along a mesh, or where messages or collectives of gradients
    are of other groups than those of the mesh.
    """
    stages = len(trace.stages)
    if not stages or stages == trace.world_size or trace.stages_a_rank > 1:
        return NO_MESH
    replicas = trace.world_size // stages
    stage_of = {rank: stage for rank, stage in _stages(trace).items() if stage >= 0}
    for mesh in ({PIPELINE: stages, DATA: replicas}, {DATA: replicas, PIPELINE: stages}):
        if stages * replicas == trace.world_size and all(
            own[stage] == rank
            for rank, stage in stage_of.items()
            for own in groups_along(mesh, PIPELINE)
            if rank in own
        ):
            _check_groups(trace, mesh)
            return MappingProxyType(mesh)
    raise TraceError(
        "replay does not support pipelines whose ranks lie otherwise than in a mesh of stages and replicas",
        got=", ".join(f"stage {stage} on rank {rank}" for rank, stage in sorted(stage_of.items())),
        expected=f"{stages} stages with as many replicas each, in order",
        fix="Build process groups with torch.distributed.init_device_mesh.",
    )


def recorded_on_mesh(found: Sequence[Strategy]) -> Strategy:
    """The strategy of such a job, of those that its ranks were found under. Raises TraceError where it is not known."""
    data = [each for each in found if each.dimension == DATA]
    pipelines = [each for each in found if isinstance(each, PipelineStrategy)]
    if len(data) != 1 or not isinstance(data[0], DistributedDataParallelStrategy):
        raise TraceError(
            "replay of pipelines side by side needs stages that are wrapped in DistributedDataParallel",
            got=", ".join(each.describe() for each in data) or "no strategy for gradients that it knows",
            fix="Use headway diagnose: its breakdown and its links are valid for these pipelines too.",
        )
    order = pipelines[0] if pipelines else PipelineStrategy(order="recorded")
    return MeshStrategy(pipeline=order, data=data[0])


def _stages(trace: Trace) -> dict[int, int]:
    return {rank: int(events.stage.max(initial=-1)) for rank, events in trace.events.items()}


def _check_groups(trace: Trace, mesh: Mapping[str, int]) -> None:
    """Replicas reduce gradients among themselves, and messages stay within a pipeline."""
    replicas = {rank: set(own) for own in groups_along(mesh, DATA) for rank in own}
    pipelines = {rank: set(own) for own in groups_along(mesh, PIPELINE) for rank in own}
    for rank, events in trace.events.items():
        reduced = events.of_kind(Kind.COLLECTIVE)
        for group in np.unique(np.array(reduced.group)[reduced.bucket >= 0]).tolist():
            if set(trace.members(group)) != replicas[rank]:
                raise TraceError(
                    "replay does not support gradients that are reduced among other ranks than a stage's replicas",
                    got=f"rank {rank} with ranks {', '.join(map(str, sorted(trace.members(group))))}",
                    expected=f"ranks {', '.join(map(str, sorted(replicas[rank])))}",
                )  # fmt: skip
        messages = events.of_kind(Kind.SEND, Kind.RECEIVE)
        others = set(messages.peer[messages.stage >= 0].tolist()) - pipelines[rank]
        if others:
            raise TraceError(
                "replay does not support pipelines that send each other messages",
                got=f"rank {rank} to or from rank {min(others)}",
            )
