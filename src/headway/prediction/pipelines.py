"""A model that nobody has run yet as a pipeline: cut into stages, placed on workers, and replayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pydantic import Field

from headway.cluster import Cluster
from headway.errors import UserError
from headway.graph.computation import Computation
from headway.graph.timeline import Item, Part, Point, Timeline
from headway.job import Job
from headway.model import ModelSpec
from headway.planning.stage_placement import place
from headway.planning.stage_split import Split, SplitLayer, split
from headway.prediction.workload import WARM_UP_STEPS, Workload
from headway.replayer.simulate import Simulation, simulate
from headway.scheduling.mesh import groups_along
from headway.strategies.base import DATA, PIPELINE, Strategy
from headway.strategies.data_parallel.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.pipeline.policy import PipelineStrategy

MICRO_BATCHES_A_STAGE = 4
SPLITS = 3  # that are replayed


class PredictedPipeline(PipelineStrategy):
    """A pipeline for a model that has not been cut yet."""

    stages: int | None = Field(default=None, ge=2, le=4096)
    """How many stages the model is cut into; by default as many as there are workers. With more workers there are as
    many pipelines side by side, whose stages are trained with stock DDP."""

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
    layers = _split_layers(workload, stages / micro_batches)
    found: list[tuple[Simulation, Split, Cluster]] = []
    for mesh, placed in _places(cluster, layers, stages, replicas, micro_batches):
        ranks = groups_along(mesh, PIPELINE)[0]
        for each in _splits(layers, stages, micro_batches, placed, ranks, strategy):
            job = _job(workload, placed, each, micro_batches, mesh)
            composed: Strategy = own
            if replicas > 1:
                composed = MeshStrategy(pipeline=own, data=DistributedDataParallelStrategy())
            found.append((simulate(job, composed), each, placed))
    best, cut, placed = min(found, key=lambda each: each[0].step_ms)
    names = [workload.layers[end].module for end in cut.ends[:-1]]
    notes = [
        f"{stages} stages of {replicas} {'replicas' if replicas > 1 else 'rank'} each, {micro_batches} micro-batches; "
        f"stages begin at {', '.join(names)}"
    ]
    if placed.hosts != cluster.hosts:
        notes.append(f"stages in the order of hosts {', '.join(host.name for host in placed.hosts)}")
    tied = _tied_bytes(workload, cut)
    if tied:
        notes.append("the all-reduce of gradients of weights that stages share is in the uncertainty alone")
    return PipelinePlayed(best, tuple(notes), tied)


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


def _split_layers(workload: Workload, share: float) -> tuple[SplitLayer, ...]:
    """The layers with the times of a micro-batch, which is ``share`` of a worker's batch."""
    return tuple(
        SplitLayer(
            layer.module,
            layer.forward_ns * share,
            layer.backward_ns * share,
            parameter_bytes=sum(workload.spec.by_name[name].size_bytes for name in layer.parameters),
            kept_bytes=round(layer.kept_bytes * share),
            cut_bytes=round(layer.cut_bytes * share) or None,
        )
        for layer in workload.layers
    )


def _places(
    cluster: Cluster, layers: Sequence[SplitLayer], stages: int, replicas: int, micro_batches: int
) -> Iterator[tuple[dict[str, int], Cluster]]:
    """Meshes worth a replay, with the order of hosts: which workers have which stage."""
    if replicas > 1:
        yield {PIPELINE: stages, DATA: replicas}, cluster
        yield {DATA: replicas, PIPELINE: stages}, cluster
        return
    yield {PIPELINE: stages}, cluster
    unequal = len({(host.up_gbps, host.down_gbps) for host in cluster.hosts}) > 1
    if unequal and all(host.workers == 1 for host in cluster.hosts):
        busy_ns = sum(layer.forward_ns + layer.backward_ns for layer in layers) / stages
        cut_bytes = sorted(layer.cut_bytes for layer in layers if layer.cut_bytes)
        usual = cut_bytes[len(cut_bytes) // 2]
        placed = place(
            [busy_ns] * stages, lambda _stage, a, b: message_ns(cluster, a, b, usual), micro_batches
        )
        hosts = tuple(cluster.hosts[worker] for worker in placed.workers)
        yield {PIPELINE: stages}, cluster.model_copy(update={"hosts": hosts})


def _splits(
    layers: Sequence[SplitLayer],
    stages: int,
    micro_batches: int,
    cluster: Cluster,
    ranks: Sequence[int],
    strategy: PipelineStrategy,
) -> tuple[Split, ...]:
    def passing_ns(stage: int, size_bytes: int) -> float:
        one, other = ranks[stage], ranks[stage + 1]
        return max(message_ns(cluster, one, other, size_bytes), message_ns(cluster, other, one, size_bytes))

    if strategy.split_points:
        return (_by_hand(layers, stages, strategy.split_points),)
    return split(layers, stages, micro_batches, passing_ns, keep=SPLITS)


def _by_hand(layers: Sequence[SplitLayer], stages: int, points: Sequence[str]) -> Split:
    """The split at modules: a stage begins at the first layer of each."""
    ends = []
    for point in points:
        inside = [i for i, each in enumerate(layers) if f"{each.name}.".startswith(f"{point}.")]
        if not inside or not inside[0] or layers[inside[0] - 1].cut_bytes is None:
            raise UserError(
                "the model cannot be cut where a split point says", got=point,
                expected="a module behind a layer that has cut_bytes",
            )  # fmt: skip
        ends.append(inside[0])
    if ends != sorted(set(ends)) or len(ends) != stages - 1:
        raise UserError(
            "the split points do not make the stages", got=", ".join(points),
            expected=f"{stages - 1} modules in the order of forward",
        )  # fmt: skip
    return Split((*ends, len(layers)), 0.0, 0.0)


def message_ns(cluster: Cluster, sender: int, receiver: int, size_bytes: int) -> float:
    """How long a message takes alone from one worker to another."""
    hosts = [host for host in cluster.hosts for _ in range(host.workers)]
    one, other = hosts[sender], hosts[receiver]
    if one is other:
        return cluster.local_latency_us * 1e3 + 8 * size_bytes / cluster.local_gbps
    return cluster.latency_us * 1e3 + 8 * size_bytes / min(one.up_gbps, other.down_gbps)


def _job(workload: Workload, cluster: Cluster, cut: Split, micro_batches: int, mesh: dict[str, int]) -> Job:
    stages = len(cut.ends)
    share = stages / micro_batches
    layers = workload.layers
    timelines = {}
    for ranks in groups_along(mesh, PIPELINE):
        for stage, rank in enumerate(ranks):
            timelines[rank] = (_timeline(workload, cut.layers(stage), stage, rank, micro_batches, share),)
    return Job(
        stages=tuple(_model(workload, cut.layers(stage), share) for stage in range(stages)),
        world_size=cluster.world_size,
        cluster=cluster,
        computation=Computation(timelines, warm_up_steps=WARM_UP_STEPS),
        boundary_bytes=tuple(round(layers[end - 1].cut_bytes * share) for end in cut.ends[:-1]),
        mesh=mesh if len(mesh) > 1 else {},
    )


def _model(workload: Workload, own: range, share: float) -> ModelSpec:
    """The model of a stage; parameters that layers of several stages use are in each of them."""
    spec = workload.spec
    names = list(dict.fromkeys(name for index in own for name in workload.layers[index].parameters))
    parameters = tuple(spec.by_name[name] for name in names)
    part = sum(each.size_bytes for each in parameters) / max(1, spec.size_bytes)
    kept = sum(workload.layers[index].kept_bytes for index in own)
    if not any(layer.kept_bytes for layer in workload.layers):
        kept = round(spec.activation_bytes * len(own) / len(workload.layers))
    return ModelSpec(
        parameters=parameters,
        forward_order=tuple(workload.layers[index].module for index in own),
        ready_order=tuple(reversed(names)),
        activation_bytes=round(kept * share),
        optimizer_state_bytes=round(spec.optimizer_state_bytes * part),
    )


def _timeline(
    workload: Workload, own: range, stage: int, rank: int, micro_batches: int, share: float
) -> Timeline:
    """One step of a stage: micro-batches there, and back; the last one readies gradients."""
    layers = [workload.layers[index] for index in own]
    items = []

    def along(part: str, micro_batch: int, times_ns: Sequence[int]) -> list[Item]:
        """Stretches that end at the sums of times in proportion, so that rounding does not add up."""
        ends = [round(total * share) for total in accumulate(times_ns)]
        lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        return [Item(part, duration_ns=length, stage=stage, micro_batch=micro_batch) for length in lengths]

    for each in range(micro_batches):
        (forward,) = along(Part.FORWARD, each, [sum(layer.forward_ns for layer in layers)])
        items.append(forward)
    for each in range(micro_batches - 1):
        (backward,) = along(Part.BACKWARD, each, [sum(layer.backward_ns for layer in layers)])
        items.append(backward)
    last = micro_batches - 1
    uses = [name for layer in layers for name in layer.parameters]
    stretches = along(Part.BACKWARD, last, [layer.backward_ns for layer in reversed(layers)])
    for layer, stretch in zip(reversed(layers), stretches, strict=True):
        items.append(stretch)
        for name in reversed(layer.parameters):
            uses.remove(name)
            if name not in uses:
                items.append(Item(Point.READY, name, stage=stage, micro_batch=last))
    items.append(Item(Point.BACKWARD_END, stage=stage, micro_batch=last))
    held = sum(workload.spec.by_name[name].size_bytes for name in {n for la in layers for n in la.parameters})
    update_ns = round(workload.optimizer_ns * held / max(1, workload.spec.size_bytes))
    items += [Item(Point.STEP), Item(Part.OPTIMIZER, "", update_ns)]
    return Timeline(rank, 0, tuple(items))


def _tied_bytes(workload: Workload, cut: Split) -> int:
    """The size of the parameters that layers of several stages use."""
    stages_of: dict[str, set[int]] = {}
    for stage in range(len(cut.ends)):
        for index in cut.layers(stage):
            for name in workload.layers[index].parameters:
                stages_of.setdefault(name, set()).add(stage)
    return sum(workload.spec.by_name[name].size_bytes for name, on in stages_of.items() if len(on) > 1)
