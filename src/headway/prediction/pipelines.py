"""A model that nobody has run yet as a pipeline: cut into stages, placed on workers, and replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from pydantic import Field

from headway.cluster import Cluster
from headway.errors import UserError
from headway.planning.stage_split import Split, SplitLayer, split
from headway.prediction.workload import WARM_UP_STEPS, Workload
from headway.replayer.simulate import Simulation, simulate
from headway.scheduling.mesh import groups_along
from headway.strategies.base import PIPELINE, Strategy
from headway.strategies.data_parallel.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.data_parallel.decoupled.policy import DecoupledStrategy
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
SPLITS = 3  # that are replayed, and one that is even
NAMED_HOSTS = 16
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
class PlacedStage:
    """A stage: the layer that it begins at, and the names of the hosts that have it, those of the replicas in turn."""

    stage: int
    begins_at: str
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlacedPipelines:
    """Which workers have which stage: along ``mesh``, the outermost dimension first, over ``hosts`` in this order."""

    mesh: Mapping[str, int]
    micro_batches: int
    hosts: tuple[str, ...]
    stages: tuple[PlacedStage, ...]

    def describe(self) -> str:
        """Say which host has which stage; of more than ``NAMED_HOSTS`` how many have the first and the last."""
        if len(self.hosts) > NAMED_HOSTS:
            first, last = self.stages[0], self.stages[-1]
            return f"stage 0 on {_span(first.hosts)}, and so on to stage {last.stage} on {_span(last.hosts)}"
        said = []
        for hosts, alike in groupby(self.stages, key=lambda stage: stage.hosts):
            numbers = [stage.stage for stage in alike]
            several = len(numbers) > 1
            which = f"stages {numbers[0]} to {numbers[-1]}" if several else f"stage {numbers[0]}"
            said.append(f"{which} on {', '.join(hosts)}")
        return "; ".join(said)


def _span(hosts: Sequence[str]) -> str:
    return hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts from {hosts[0]} to {hosts[-1]}"


@dataclass(frozen=True, slots=True)
class PipelinePlayed:
    """The fastest of the pipelines that were replayed, and what is to be said of it."""

    simulation: Simulation
    placed: PlacedPipelines
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
    found: list[tuple[Simulation, Split, Mapping[str, int]]] = []
    for mesh, order in places(cluster, layers, stages, replicas, micro_batches):
        placed = reordered(cluster, order)
        ranks = groups_along(mesh, PIPELINE)[0]
        for each in _splits(layers, stages, micro_batches, placed, ranks, strategy):
            job = cut_job(model, placed, each, micro_batches, mesh)
            composed: Strategy = own
            if replicas > 1:
                composed = MeshStrategy(pipeline=own, data=REPLICATED[strategy.replicas])
            found.append((simulate(job, composed), each, mesh))
    best, cut, mesh = min(found, key=lambda each: each[0].step_ms)
    where = _where(workload, best.job.on, cut, micro_batches, mesh)
    sizes = " x ".join(f"{size} {name}" for name, size in mesh.items())
    notes = [
        f"{stages} stages of {replicas} {'replicas' if replicas > 1 else 'rank'} each, {micro_batches} micro-batches; "
        f"stages begin at {', '.join(stage.begins_at for stage in where.stages[1:])}",
        f"mesh: {sizes}; {where.describe()}",
    ]
    if best.job.on.hosts != cluster.hosts and len(cluster.hosts) <= NAMED_HOSTS:
        notes.append(f"stages in the order of hosts {', '.join(where.hosts)}")
    tied = tied_bytes(model, cut)
    if tied:
        notes.append("the all-reduce of gradients of weights that stages share is in the uncertainty alone")
    return PipelinePlayed(best, where, tuple(notes), tied)


def _where(
    workload: Workload, cluster: Cluster, cut: Split, micro_batches: int, mesh: Mapping[str, int]
) -> PlacedPipelines:
    names = [cluster.hosts[host].name for host in cluster.host_of_rank]
    pipelines = groups_along(mesh, PIPELINE)
    stages = tuple(
        PlacedStage(
            stage,
            workload.layers[cut.layers(stage)[0]].module,
            tuple(dict.fromkeys(names[ranks[stage % len(ranks)]] for ranks in pipelines)),
        )
        for stage in range(len(cut.ends))
    )
    return PlacedPipelines(dict(mesh), micro_batches, tuple(host.name for host in cluster.hosts), stages)


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
    # Where messages decide, stages may be uneven at no cost, but what replicas add up is not.
    even = split(layers, stages, micro_batches, lambda _stage, _size_bytes: 0.0)
    return tuple(
        dict.fromkeys(
            Split(each.ends, 0.0, 0.0)
            for each in (*split(layers, stages, micro_batches, passing(cluster, ranks), keep=SPLITS), *even)
        )
    )
