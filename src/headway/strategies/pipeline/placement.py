"""Where this rank is among pipelines side by side: which stage of which pipeline, and its groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
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
        ranks = tuple(tuple(own) for own in by_pipeline.tolist())
        pipeline, stage = next(
            (p, own.index(dist.get_rank())) for p, own in enumerate(ranks) if dist.get_rank() in own
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
        found = Placement.on(_checked(mesh, planned))
    elif isinstance(strategy, MeshStrategy) or (planned is not None and len(planned) > 1):
        sizes = planned or _sizes_of(strategy)
        if math.prod(sizes.values()) != dist.get_world_size():
            raise PlanError(
                "the plan is for another world size",
                got=f"{dist.get_world_size()} workers",
                expected=_said(sizes),
            )
        found = Placement.on(init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes)))
    else:
        found = Placement.of_all_ranks()
    return found


def _checked(mesh: object, planned: Mapping[str, int] | None) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        raise UserError(
            "mesh is no mesh", got=type(mesh).__name__, expected="a torch.distributed.DeviceMesh",
            fix="Construct it with torch.distributed.device_mesh.init_device_mesh.",
        )  # fmt: skip
    given = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if planned is not None and list(given.items()) != list(planned.items()):
        raise PlanError(
            "the mesh is not the one that the plan is for", got=_said(given), expected=_said(planned)
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


def _said(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{size} {name}" for name, size in mesh.items()) or "dimensions without names"
