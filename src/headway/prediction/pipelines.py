"""A model that nobody has run yet as a pipeline: cut into stages, placed on workers, and replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from headway.cluster import Cluster
from headway.errors import UserError
from headway.planning.stage_split import Split, SplitLayer, split
from headway.prediction.workload import WARM_UP_STEPS, Workload
from headway.replayer.simulate import Simulation, simulate
from headway.scheduling.mesh import groups_along
from headway.strategies.base import PIPELINE, Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.pipeline.cut_job import (
    CutModel,
    LayerStep,
    cut_by_hand,
    cut_job,
    passing,
    places,
    reordered,
    split_layers,
    tied_bytes,
)
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.pipeline.policy import PipelineStrategy

MICRO_BATCHES_A_STAGE = 4
SPLITS = 3  # that are replayed
REPLICATED = {each.name: each for each in (DistributedDataParallelStrategy(), DecoupledStrategy())}


class PredictedPipeline(PipelineStrategy):
    """A pipeline for a model that has not been cut yet."""

    stages: int | None = Field(default=None, ge=2, le=4096)
    """How many stages the model is cut into; by default as many as there are workers. With more workers there are as
    many pipelines side by side."""
    replicas: Literal["ddp", "decoupled"] = "ddp"
    """How the replicas of a stage add up gradients, where there are several pipelines."""

    def applies(self, workers: int) -> bool:
        """Whether so many workers make whole pipelines."""
        return workers > 1 and workers % (self.stages or workers) == 0


@dataclass(frozen=True, slots=True)
class PipelinePlayed:
    """The fastest of the pipelines that were replayed, and what is to be said of it."""

    simulation: Simulation
    notes: tuple[str, ...]
    tied_bytes: int


def play_pipeline(workload: Workload, cluster: Cluster, strategy: PredictedPipeline) -> PipelinePlayed:
    """Cut ``workload`` into stages in the ways that promise most, replay them on ``cluster``, and take the fastest.

    Each pipeline of S stages trains on S workers' batches. Times of layers are taken to be in proportion to the size of
    a micro-batch. Raises UserError where the workers make no whole pipelines, or the model cannot be cut so often.
    """
    stages, micro_batches = _sizes(workload, cluster, strategy)
    own = strategy.model_copy(update={"micro_batches": micro_batches, "stages": None})
    replicas = cluster.world_size // stages
    model = _cut_model(workload)
    layers = split_layers(model, workload.layers, stages / micro_batches)
    found: list[tuple[Simulation, Split, Cluster]] = []
    for mesh, order in places(cluster, layers, stages, replicas, micro_batches):
        placed = reordered(cluster, order)
        ranks = groups_along(mesh, PIPELINE)[0]
        for each in _splits(layers, stages, micro_batches, placed, ranks, strategy):
            job = cut_job(model, placed, each, micro_batches, mesh)
            composed: Strategy = own
            if replicas > 1:
                composed = MeshStrategy(pipeline=own, data=REPLICATED[strategy.replicas])
            found.append((simulate(job, composed), each, placed))
    best, cut, placed = min(found, key=lambda each: each[0].step_ms)
    names = [workload.layers[end].module for end in cut.ends[:-1]]
    notes = [
        f"{stages} stages of {replicas} {'replicas' if replicas > 1 else 'rank'} each, {micro_batches} micro-batches; "
        f"stages begin at {', '.join(names)}"
    ]
    if placed.hosts != cluster.hosts:
        notes.append(f"stages in the order of hosts {', '.join(host.name for host in placed.hosts)}")
    tied = tied_bytes(model, cut)
    if tied:
        notes.append("the all-reduce of gradients of weights that stages share is in the uncertainty alone")
    return PipelinePlayed(best, tuple(notes), tied)


def _cut_model(workload: Workload) -> CutModel:
    step = (LayerStep(workload.layers, workload.optimizer_ns),)
    return CutModel(workload.spec, lambda _worker: step, {}, WARM_UP_STEPS)


def _sizes(workload: Workload, cluster: Cluster, strategy: PredictedPipeline) -> tuple[int, int]:
    workers = cluster.world_size
    if not strategy.applies(workers):
        raise UserError(
            "the workers do not make whole pipelines", got=f"{workers} workers",
            expected=f"a multiple of {strategy.stages or 2}", fix="Give pipeline:stages=N.",
        )  # fmt: skip
    stages = strategy.stages or workers
    most = 1 + sum(layer.cut_bytes > 0 for layer in workload.layers[:-1])
    if most == 1:
        raise UserError(
            "nothing says where the model may be cut into stages", got=workload.name,
            expected="cut_bytes of some layers, the size of what is passed on behind them",
            fix="Give a layer table in a YAML file, with cut_bytes, or one of the models that ship.",
        )  # fmt: skip
    if stages > most:
        raise UserError(
            "the model cannot be cut into so many stages", got=f"{stages}", expected=f"at most {most}",
            fix=f"Give pipeline:stages=N with N up to {most}, a divisor of {workers}.",
        )  # fmt: skip
    samples = workload.samples * stages
    micro_batches = strategy.micro_batches or min(MICRO_BATCHES_A_STAGE * stages, samples)
    if micro_batches > samples:
        raise UserError(
            "a pipeline has fewer samples than micro-batches", got=f"{micro_batches} micro-batches",
            expected=f"at most {samples}, {workload.samples} a worker",
        )  # fmt: skip
    return stages, micro_batches


def _splits(
    layers: Sequence[SplitLayer],
    stages: int,
    micro_batches: int,
    cluster: Cluster,
    ranks: Sequence[int],
    strategy: PipelineStrategy,
) -> tuple[Split, ...]:
    if strategy.split_points:
        return (cut_by_hand(layers, stages, strategy.split_points),)
    return split(layers, stages, micro_batches, passing(cluster, ranks), keep=SPLITS)
