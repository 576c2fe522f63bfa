"""Where this rank is among pipelines side by side: which stage of which pipeline, and its groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headway.errors import PlanError, UserError
from headway.strategies.base import DATA, PIPELINE, Strategy
from headway.strategies.pipeline.mesh import MeshStrategy

_FORMS = f"the dimensions {PIPELINE} and {DATA}, or {PIPELINE} alone"


@dataclass(frozen=True)
class Placement:
    """``ranks[p][s]`` is the rank of the job that has stage ``s`` of pipeline ``p``; every rank has one.

    ``group`` has the ranks of this pipeline in the order of stages, ``replicas`` those of this stage; None where there
    is one pipeline.
    """

    ranks: tuple[tuple[int, ...], ...]
    pipeline: int
    stage: int
    group: dist.ProcessGroup
    replicas: dist.ProcessGroup | None = None

    @property
    def stages(self) -> int:
        """The number of stages of each pipeline."""
        return len(self.ranks[0])

    @property
    def pipelines(self) -> int:
        """The number of pipelines."""
        return len(self.ranks)

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.stage == self.stages - 1

    @classmethod
    def of_all_ranks(cls) -> Placement:
        """One pipeline of all ranks."""
        group = dist.group.WORLD
        assert group is not None
        return cls((tuple(range(dist.get_world_size())),), 0, dist.get_rank(), group)

    @classmethod
    def on(cls, mesh: DeviceMesh) -> Placement:
        """That on ``mesh``, whose dimensions are named "pipeline" and "data", in either order, or "pipeline" alone.

        Raises UserError for one of other dimensions, and where it does not have every rank of the job once.
        """
        names = tuple(mesh.mesh_dim_names or ())
        if set(names) not in ({PIPELINE, DATA}, {PIPELINE}):
            raise UserError(
                "the mesh has other dimensions than pipelines have",
                got=", ".join(map(repr, names)) or "dimensions without names", expected=_FORMS,
                fix=f"Construct it with mesh_dim_names=({PIPELINE!r}, {DATA!r}).",
            )  # fmt: skip
        if sorted(mesh.mesh.flatten().tolist()) != list(range(dist.get_world_size())):
            raise UserError(
                "the mesh does not have every rank of the job", got=f"{mesh.mesh.numel()} ranks",
                expected=f"{dist.get_world_size()}",
            )  # fmt: skip
        by_pipeline = mesh.mesh.movedim(names.index(PIPELINE), -1).reshape(-1, mesh[PIPELINE].size())
        ranks = tuple(tuple(row) for row in by_pipeline.tolist())
        pipeline, stage = next(
            (p, rank.index(dist.get_rank())) for p, rank in enumerate(ranks) if dist.get_rank() in rank
        )
        replicas = mesh.get_group(DATA) if len(ranks) > 1 else None
        return cls(ranks, pipeline, stage, mesh.get_group(PIPELINE), replicas)


def placed(strategy: Strategy, mesh: object, planned: Mapping[str, int] | None, device: str) -> Placement:
    """Where this rank is under ``strategy``: on ``mesh``; without one on ``planned``, the mesh of a plan.

    Where there is neither, one pipeline has all ranks, and ``split_points`` say how many stages those side by side
    have. Every rank calls it. Raises UserError for a mesh that no pipelines are on, PlanError where it is not the
    planned one, and where nothing says how many pipelines there are.
    """
    if mesh is not None:
        placement = Placement.on(_checked(mesh, planned))
    elif isinstance(strategy, MeshStrategy) or (planned is not None and len(planned) > 1):
        sizes = planned or _sizes_of(strategy)
        if math.prod(sizes.values()) != dist.get_world_size():
            raise PlanError(
                "the plan is for another world size",
                got=f"{dist.get_world_size()} workers",
                expected=_describe(sizes),
            )
        placement = Placement.on(init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes)))
    else:
        placement = Placement.of_all_ranks()
    return placement


def _checked(mesh: object, planned: Mapping[str, int] | None) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        raise UserError(
            "mesh is no mesh", got=type(mesh).__name__, expected="a torch.distributed.DeviceMesh",
            fix="Construct it with torch.distributed.device_mesh.init_device_mesh.",
        )  # fmt: skip
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if planned is not None and list(sizes.items()) != list(planned.items()):
        raise PlanError(
            "the mesh is not the one that the plan is for", got=_describe(sizes), expected=_describe(planned)
        )
    return mesh


def _sizes_of(strategy: Strategy) -> dict[str, int]:
    """The stages that are named, and as many pipelines of them as there are ranks for."""
    assert isinstance(strategy, MeshStrategy)
    ranks, points = dist.get_world_size(), strategy.pipeline.split_points
    stages = 1 + len(points)
    if not points or ranks % stages:
        raise PlanError(
            "nothing says which ranks are a pipeline, and which have the same stage",
            got=f"{ranks} ranks" + (f" and {stages} stages" if points else ""), expected=f"a mesh of {_FORMS}",
            fix="Call headway.parallelize(…, mesh=mesh).",
        )  # fmt: skip
    return {PIPELINE: stages, DATA: ranks // stages}


def _describe(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{size} {name}" for name, size in mesh.items()) or "dimensions without names"


Replicate = Callable[[nn.Module, dist.ProcessGroup], nn.Module]
"""Wraps a stage, so that it averages gradients with the other ranks of a group."""


class Replicas:
    """This rank's ``stage`` among its replicas, ``wrapped`` by what ``replicate`` makes of it; alone it stays as it is.

    A stage none of whose parameters are trained has no gradients to average.
    """

    def __init__(
        self, stage: nn.Module, placement: Placement, replicate: Replicate | None, device: torch.device
    ) -> None:
        self._stage, self._place, self._device = stage, placement, device
        self._trained = self._trainable()
        self.wrapped = stage
        if placement.replicas is not None and self._trained:
            assert replicate is not None, "replicas average gradients"
            self.wrapped = replicate(stage, placement.replicas)

    def begin_step(self, samples: int) -> None:
        """Every rank calls it before a step that trains, with how many ``samples`` it gives its pipeline.

        Raises UserError on every rank where pipelines are given other numbers: a mean over pipelines is that over
        samples only where each has as many. Raises it too where other parameters are trained than when the stage was
        wrapped, which replicas would not average.
        """
        if self._place.replicas is None:
            return
        if changed := self._trainable() ^ self._trained:
            raise UserError(
                "other parameters are trained than when the model was parallelized",
                got=f"requires_grad of {', '.join(sorted(changed)[:4])} was changed",
                fix="Freeze parameters before headway.parallelize, or call it again on a new model.",
            )
        counts = torch.zeros(self._place.pipelines, dtype=torch.int64, device=self._device)
        counts[self._place.pipeline] = samples
        dist.all_reduce(counts)
        sample_counts = counts.tolist()
        if len(set(sample_counts)) > 1:
            raise UserError(
                "pipelines were given batches of other sizes",
                got=", ".join(f"{count} samples" for count in sample_counts),
                expected="as many samples for each pipeline",
                fix="Give every pipeline as large a part of the batch (drop_last=True in a DataLoader).",
            )
        self.share_buffers()

    def share_buffers(self) -> None:
        """Give every replica the buffers of the first pipeline's, as DistributedDataParallel does before a forward."""
        if self._place.replicas is None:
            return
        with torch.no_grad():
            for buffer in self._stage.buffers():
                dist.broadcast(buffer, self._place.ranks[0][self._place.stage], group=self._place.replicas)

    def mean_of(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean over pipelines of ``loss``, which their last ranks know, on every rank."""
        total = loss if self._place.is_last else torch.zeros_like(loss)
        dist.all_reduce(total)
        return total / self._place.pipelines

    def _trainable(self) -> frozenset[str]:
        return frozenset(
            name for name, parameter in self._stage.named_parameters() if parameter.requires_grad
        )
