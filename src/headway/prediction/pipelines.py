"""Predicts pipelines for an unsplit model: splits it into stages, places them on workers, and simulates them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from pydantic import Field, model_validator

from headway.cluster import Cluster
from headway.errors import UserError
from headway.prediction.tensor_parallel import on_groups, with_all_reduces
from headway.prediction.workload import WARM_UP_STEPS, Workload
from headway.scheduling.mesh import groups_along
from headway.scheduling.pipeline.orders import LOOPED_ORDERS
from headway.simulator.simulate import Simulation, simulate
from headway.simulator.what_if import WhatIf
from headway.strategies.base import DATA, DATA_INSIDE, PIPELINE, Strategy
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
from headway.strategies.pipeline.stage_times import Split, SplitLayer, split

MICRO_BATCHES_A_STAGE = 4
SPLITS = 3  # replayed splits, besides an even one
NAMED_HOSTS = 16
REPLICATED = {
    strategy.name: strategy for strategy in (DistributedDataParallelStrategy(), DecoupledStrategy())
}
CHANCE_STEPS = 40  # simulated steps if some are randomly slow
TENSOR = "tensor"


class PredictedPipeline(PipelineStrategy):
    """A pipeline strategy for a model that is not split yet."""

    stages: int | None = Field(default=None, ge=2, le=4096)
    """The number of stages per pipeline; by default the number of workers. More workers run parallel pipelines."""
    interleave: int = Field(default=1, ge=1, le=256)
    """How many stages each worker of a pipeline holds, in turn; the model has this many times more stages."""
    tensor: int = Field(default=1, ge=1, le=4096)
    """The workers of a host that share each layer (tensor parallelism); only predictions support it."""
    replicas: Literal["ddp", "decoupled"] = "ddp"
    """How the replicas of a stage reduce gradients, if there are several pipelines."""

    @model_validator(mode="after")
    def _orders_of_several_stages(self) -> PredictedPipeline:
        if self.interleave > 1 and self.order not in LOOPED_ORDERS and "order" in self.model_fields_set:
            raise ValueError(f"interleave is an option of {' and '.join(LOOPED_ORDERS)}, not of {self.order}")
        if self.interleave == 1 and self.order in LOOPED_ORDERS:
            raise ValueError(f"the order {self.order} needs interleave, such as interleave=2")
        return self

    def applies(self, workers: int) -> bool:
        """Whether this number of workers divides into whole pipelines."""
        groups, left = divmod(workers, self.tensor)
        return groups > 1 and not left and groups % (self.stages or groups) == 0

    def on_ranks(self, micro_batches: int) -> PipelineStrategy:
        """The pipeline strategy to run, with this number of micro-batches."""
        order = "interleaved" if self.interleave > 1 and self.order not in LOOPED_ORDERS else self.order
        return self.model_copy(
            update={
                "micro_batches": micro_batches,
                "stages": None,
                "order": order,
                "interleave": 1,
                "tensor": 1,
            }
        )


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """A stage: its first layer, and the hosts of its replicas in order."""

    stage: int
    begins_at: str
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlacedPipelines:
    """The placement of stages: along ``mesh`` (outermost dimension first), over ``hosts`` in this order.

    ``played`` pipelines were simulated; they represent identical ones.
    """

    mesh: Mapping[str, int]
    micro_batches: int
    played: int
    hosts: tuple[str, ...]
    stages: tuple[PlacedStage, ...]

    def describe(self) -> str:
        """Describe the hosts of each stage; with more than ``NAMED_HOSTS``, only of the first and last stage."""
        if len(self.hosts) > NAMED_HOSTS:
            first, last = self.stages[0], self.stages[-1]
            return f"stage 0 on {_span(first.hosts)}, up to stage {last.stage} on {_span(last.hosts)}"
        descriptions = []
        for hosts, alike in groupby(self.stages, key=lambda stage: stage.hosts):
            numbers = [stage.stage for stage in alike]
            several = len(numbers) > 1
            which = f"stages {numbers[0]} to {numbers[-1]}" if several else f"stage {numbers[0]}"
            descriptions.append(f"{which} on {', '.join(hosts)}")
        return "; ".join(descriptions)


def _span(hosts: Sequence[str]) -> str:
    return hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts from {hosts[0]} to {hosts[-1]}"


@dataclass(frozen=True, slots=True)
class PipelinePlayed:
    """The fastest simulated pipeline, with its placement and notes.

    ``tensor_ns`` is the part of its computation that all-reduces within layers take.
    """

    simulation: Simulation
    placed: PlacedPipelines
    notes: tuple[str, ...]
    tied_bytes: int
    tensor_ns: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """A candidate's mesh and order of hosts, and an equivalent layout that lets identical pipelines be folded.

    In the equivalent layout, rank ``r`` behaves like rank ``r`` modulo ``known_ranks``; None means no such symmetry.
    """

    mesh: Mapping[str, int]
    order: tuple[int, ...]
    played_mesh: Mapping[str, int]
    played_order: tuple[int, ...]
    known_ranks: int | None

    @classmethod
    def of(cls, cluster: Cluster, mesh: Mapping[str, int], order: tuple[int, ...]) -> _Layout:
        """If stages are the outer dimension, keep replicas on a host together and split a stage's hosts into blocks."""
        stages, replicas = mesh[PIPELINE], mesh.get(DATA, 1)
        if next(iter(mesh)) == DATA:
            return cls(mesh, order, mesh, order, stages)
        workers = {host.workers for host in cluster.hosts}
        inside = min(workers)
        if len(workers) > 1 or replicas <= inside or replicas % inside:
            return cls(mesh, order, mesh, order, None)
        blocks = replicas // inside
        by_block = tuple(order[stage * blocks + block] for block in range(blocks) for stage in range(stages))
        played = {DATA: blocks, PIPELINE: stages, DATA_INSIDE: inside}
        return cls(mesh, order, played, by_block, stages * inside)


def play_pipeline(
    workload: Workload,
    cluster: Cluster,
    strategy: PredictedPipeline,
    what_if: WhatIf = WhatIf(),  # noqa: B008
    *,
    fold: bool = True,
) -> PipelinePlayed:
    """Split ``workload`` into stages in the most promising ways, simulate them on ``cluster``, and take the fastest.

    A pipeline of S stages trains on the batches of S workers. Layer times are assumed proportional to the size of a
    micro-batch. ``cluster`` already reflects ``what_if``; splits assume identical workers. Identical pipelines are
    simulated once, unless ``fold`` is False. Raises UserError if the workers do not divide into whole pipelines, or the
    model cannot be split into that many stages.
    """
    ranks, micro_batches = _sizes(workload, cluster, strategy)
    stages = ranks * strategy.interleave
    on_ranks = strategy.on_ranks(micro_batches)
    grouped = on_groups(cluster, strategy.tensor)
    sharing = with_all_reduces(workload, cluster, strategy.tensor, ranks / micro_batches, what_if.compute)
    replicas = grouped.world_size // ranks
    model = _cut_model(sharing, CHANCE_STEPS if what_if.incidents.slow_share else 1)
    layers = split_layers(model, sharing.layers, ranks / micro_batches * what_if.compute)
    results: list[tuple[Simulation, Split, _Layout]] = []
    for mesh, order in places(grouped, layers, stages, replicas, micro_batches):
        layout = _Layout.of(grouped, mesh, order)
        in_turn = groups_along(mesh, PIPELINE)[0]
        for candidate in _splits(layers, stages, micro_batches, reordered(grouped, order), in_turn, strategy):
            job = cut_job(
                model, reordered(grouped, layout.played_order), candidate, micro_batches, layout.played_mesh,
                known_ranks=layout.known_ranks,
            )  # fmt: skip
            factors = _factors(grouped, layout.played_order, what_if.rank_factors, strategy.tensor)
            job = replace(
                job,
                computation=job.steps.scaled(what_if.compute, factors),
                incidents=what_if.incidents if what_if.incidents.are_there else job.incidents,
            )
            composed: Strategy = on_ranks
            if replicas > 1:
                composed = MeshStrategy(pipeline=on_ranks, data=REPLICATED[strategy.replicas])
            results.append((simulate(job, composed, fold=fold), candidate, layout))
    best, cut, layout = min(results, key=lambda candidate: candidate[0].step_ms)
    where = _where(sharing, grouped, cut, micro_batches, layout, strategy.tensor, best.graph.ranks // ranks)
    tied = tied_bytes(model, cut)
    notes = tuple(_notes(cluster, where, strategy, replicas, tied))
    tensor_ns = round(what_if.compute * (sharing.passes_ns - workload.passes_ns))
    return PipelinePlayed(best, where, notes, tied, tensor_ns)


def _factors(
    cluster: Cluster, order: Sequence[int], of_workers: Mapping[int, float], tensor: int
) -> dict[int, float]:
    """Slowdown of computation by rank, for hosts in ``order``; a group is as slow as its slowest worker."""
    firsts, first = [], 0
    for host in cluster.hosts:
        firsts.append(first)
        first += host.workers
    groups = [firsts[host] + group for host in order for group in range(cluster.hosts[host].workers)]
    slowest = (
        max(of_workers.get(worker, 1.0) for worker in range(group * tensor, (group + 1) * tensor))
        for group in groups
    )
    return {rank: factor for rank, factor in enumerate(slowest) if factor != 1.0} if of_workers else {}


def _where(
    workload: Workload,
    cluster: Cluster,
    cut: Split,
    micro_batches: int,
    layout: _Layout,
    tensor: int,
    played: int,
) -> PlacedPipelines:
    placed = reordered(cluster, layout.order)
    names = [placed.hosts[host].name for host in placed.host_of_rank]
    pipelines = groups_along(layout.mesh, PIPELINE)
    stages = tuple(
        PlacedStage(
            stage,
            workload.layers[cut.layers(stage)[0]].module,
            tuple(dict.fromkeys(names[ranks[stage % len(ranks)]] for ranks in pipelines)),
        )
        for stage in range(len(cut.ends))
    )
    mesh = {**layout.mesh, **({TENSOR: tensor} if tensor > 1 else {})}
    return PlacedPipelines(mesh, micro_batches, played, tuple(host.name for host in placed.hosts), stages)


def _notes(
    cluster: Cluster, where: PlacedPipelines, strategy: PredictedPipeline, replicas: int, tied: int
) -> Iterator[str]:
    ranks = where.mesh[PIPELINE]
    held_by = f" of {replicas} replicas each" if replicas > 1 else " of 1 rank each"
    if strategy.interleave > 1:
        held_by = f", {strategy.interleave} on each of {ranks} ranks" + (
            f",{held_by}" if replicas > 1 else ""
        )
    yield (
        f"{len(where.stages)} stages{held_by}, {where.micro_batches} micro-batches; stages begin at "
        f"{', '.join(stage.begins_at for stage in where.stages[1:])}"
    )
    sizes = " x ".join(f"{size} {name}" for name, size in where.mesh.items())
    yield f"mesh: {sizes}; {where.describe()}"
    if where.hosts != tuple(host.name for host in cluster.hosts) and len(where.hosts) <= NAMED_HOSTS:
        yield f"stages in the order of hosts {', '.join(where.hosts)}"
    if where.played < replicas:
        yield (
            f"{where.played} of {replicas} identical pipelines "
            f"{'was' if where.played == 1 else 'were'} simulated, with the all-reduces of all"
        )
    if strategy.tensor > 1:
        yield (
            f"each layer is shared by {strategy.tensor} workers of a host, with two all-reduces forward and two back "
            "per block; Headway cannot run that"
        )
    if tied:
        yield "the all-reduce of shared weights' gradients only counts in the uncertainty"


def _cut_model(workload: Workload, steps: int) -> CutModel:
    step = (LayerStep(workload.layers, workload.optimizer_ns),) * steps
    return CutModel(workload.spec, lambda _worker: step, {}, WARM_UP_STEPS)


def _sizes(workload: Workload, cluster: Cluster, strategy: PredictedPipeline) -> tuple[int, int]:
    """The ranks per pipeline, and the number of micro-batches."""
    workers = cluster.world_size
    if not strategy.applies(workers):
        raise UserError(
            "the workers do not divide into whole pipelines", got=f"{workers} workers",
            expected=f"a multiple of {(strategy.stages or 2) * strategy.tensor}", fix="Use pipeline:stages=N.",
        )  # fmt: skip
    ranks = strategy.stages or workers // strategy.tensor
    stages = ranks * strategy.interleave
    most = 1 + sum(layer.cut_bytes > 0 for layer in workload.layers[:-1])
    if most == 1:
        raise UserError(
            "the model has no layer after which it may be split into stages", got=workload.name,
            expected="layers with cut_bytes, the size of their output",
            fix="Use a layer table (YAML file) with cut_bytes, or one of the bundled models.",
        )  # fmt: skip
    if stages > most:
        raise UserError(
            "the model cannot be split into that many stages", got=f"{stages}", expected=f"at most {most}",
            fix=f"Use pipeline:stages=N with N up to {most // strategy.interleave}, a divisor of "
            f"{workers // strategy.tensor}.",
        )  # fmt: skip
    samples = workload.samples * ranks * strategy.tensor
    most_in_turn = min(MICRO_BATCHES_A_STAGE * ranks, samples)
    if strategy.interleave > 1 and most_in_turn >= ranks:
        most_in_turn -= most_in_turn % ranks  # micro-batches pass through stages in rounds
    micro_batches = strategy.micro_batches or most_in_turn
    if micro_batches > samples:
        raise UserError(
            "a pipeline has fewer samples than micro-batches", got=f"{micro_batches} micro-batches",
            expected=f"at most {samples}, {workload.samples} per worker",
        )  # fmt: skip
    return ranks, micro_batches


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
    # Messages may favor uneven stages, but the all-reduces of replicas favor even ones, so try both.
    even = split(layers, stages, micro_batches, lambda _stage, _size_bytes: 0.0)
    return tuple(
        dict.fromkeys(
            Split(candidate.ends, 0.0, 0.0)
            for candidate in (
                *split(layers, stages, micro_batches, passing(cluster, ranks), keep=SPLITS),
                *even,
            )
        )
    )
