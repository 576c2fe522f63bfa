"""Job: what is trained, what its ranks compute in a step, and on which cluster. Decisions and replays start from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from headway.cluster import Cluster
from headway.errors import UserError
from headway.graph.computation import Computation
from headway.incidents import Incidents
from headway.model import ModelSpec, PassMemory


@dataclass(frozen=True, slots=True)
class OptimizerUse:
    """The optimizers of a job, by the names of their classes, and how many of them step after one backward."""

    names: tuple[str, ...] = ()
    steps_a_backward: float = 1


@dataclass(frozen=True, slots=True)
class MeasuredEffect:
    """What a pass did where it was measured: so many times the time, and ``held_bytes`` of memory meanwhile.

    ``memory`` is what a rank was seen to hold in a forward and backward under it, where that was watched.
    """

    factor: float
    held_bytes: int = 0
    memory: PassMemory | None = None


@dataclass(frozen=True, eq=False)
class Job:
    """One distributed training job, as far as it is known.

    ``stages`` are the models of its pipeline's stages, a single one if the model is not split. ``cluster`` is None
    if only decisions are needed, and ``computation`` if nothing was recorded or predicted: a live job knows
    its model and its ``world_size``. ``refusals`` says, by the name of a strategy or pass, why its model cannot
    be trained under it. ``has_parameters`` is False if ``stages`` represent recorded buckets of unknown parameters.
    ``boundary_bytes[s]`` is what stage ``s`` sends to stage ``s + 1`` for one micro-batch. ``mesh`` is the size of each
    dimension along which ranks share the work, the outermost first, where there are several. ``incidents`` are what a
    simulated job lives through. ``measured`` are effects of passes that cannot be told without having been measured, by
    names that the passes give them.
    """

    stages: tuple[ModelSpec, ...]
    world_size: int
    cluster: Cluster | None = None
    computation: Computation | None = None
    optimizers: OptimizerUse = OptimizerUse()
    refusals: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    has_parameters: bool = True
    boundary_bytes: tuple[int, ...] = ()
    mesh: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    incidents: Incidents = field(default_factory=Incidents)
    measured: Mapping[str, MeasuredEffect] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        assert self.cluster is None or self.cluster.world_size == self.world_size
        assert len(self.boundary_bytes) == len(self.stages) - 1
        assert not self.mesh or math.prod(self.mesh.values()) == self.world_size

    @classmethod
    def of(cls, model: ModelSpec, world_size: int = 1) -> Job:
        """A job of ``world_size`` ranks that all train ``model``, of which nothing else is known."""
        return cls((model,), world_size)

    @property
    def model(self) -> ModelSpec:
        """The model that every rank trains."""
        (model,) = self.stages
        return model

    @property
    def on(self) -> Cluster:
        """The cluster of a job that is to be simulated."""
        assert self.cluster is not None
        return self.cluster

    @property
    def steps(self) -> Computation:
        """The computation of a job that is to be simulated."""
        assert self.computation is not None
        return self.computation

    def moved_to(self, cluster: Cluster) -> Job:
        """The same job on another cluster, of any number of workers.

        Raises UserError for another number where ranks are those of a mesh, or wait for groups of some ranks.
        """
        if cluster.world_size != self.world_size and self.steps.has_groups:
            raise UserError(
                "a replay of ranks that wait for collectives of some ranks has as many workers as were recorded",
                got=f"{cluster.world_size} workers", expected=f"{self.world_size}",
            )  # fmt: skip
        if self.mesh and cluster.world_size != self.world_size:
            raise UserError(
                "a replay of pipelines side by side has as many workers as were recorded",
                got=f"{cluster.world_size} workers", expected=f"{self.world_size}",
            )  # fmt: skip
        return replace(self, cluster=cluster, world_size=cluster.world_size)
