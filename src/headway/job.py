"""Job: the model, the computation of a step and the cluster, from which decisions and replays start."""

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
    """The measured effect of a pass: ``factor`` times the time, and ``held_bytes`` of additional memory.

    ``memory`` is the memory of a rank in forward and backward under the pass, if it was tracked.
    """

    factor: float
    held_bytes: int = 0
    memory: PassMemory | None = None


@dataclass(frozen=True, eq=False)
class Job:
    """A distributed training job, as far as it is known.

    ``stages`` are the models of its pipeline's stages, a single one if the model is not split. ``cluster`` is None
    if only decisions are needed, and ``computation`` if nothing was recorded or predicted: a live job knows
    its model and its ``world_size``. ``refusals`` says, by the name of a strategy or pass, why its model cannot
    be trained under it. ``has_parameters`` is False if ``stages`` represent recorded buckets of unknown parameters.
    ``boundary_bytes[s]`` is what stage ``s`` sends to stage ``s + 1`` for one micro-batch. ``mesh`` is the size of each
    dimension along which ranks share the work, the outermost first, if there are several. ``incidents`` happen in a
    simulation. ``measured`` are effects of passes that only measurements can tell, by names that the passes choose.
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
        """A job of ``world_size`` ranks that all train ``model``; nothing else is known."""
        return cls((model,), world_size)

    @property
    def model(self) -> ModelSpec:
        """The model that every rank trains."""
        (model,) = self.stages
        return model

    @property
    def on(self) -> Cluster:
        """The cluster; only for jobs that can be simulated."""
        assert self.cluster is not None
        return self.cluster

    @property
    def steps(self) -> Computation:
        """The computation; only for jobs that can be simulated."""
        assert self.computation is not None
        return self.computation

    def moved_to(self, cluster: Cluster) -> Job:
        """The same job on another cluster, of any number of workers.

        Raises UserError for another number of workers if ranks form a mesh or use collectives of subgroups.
        """
        if cluster.world_size != self.world_size and self.steps.has_groups:
            raise UserError(
                "cannot replay collectives of subgroups with another number of workers than recorded",
                got=f"{cluster.world_size} workers", expected=f"{self.world_size}",
            )  # fmt: skip
        if self.mesh and cluster.world_size != self.world_size:
            raise UserError(
                "cannot replay replicated pipelines with another number of workers than recorded",
                got=f"{cluster.world_size} workers", expected=f"{self.world_size}",
            )  # fmt: skip
        return replace(self, cluster=cluster, world_size=cluster.world_size)
