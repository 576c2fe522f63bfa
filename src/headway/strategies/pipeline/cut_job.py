"""Builds the job of pipelines from an unsplit model: splits its layers into stages and scales their times.

A layer's time is assumed to be proportional to the micro-batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from headway.cluster import Cluster, Ways
from headway.errors import PlanError
from headway.graph.computation import Computation, Item, Part, Point, Timeline
from headway.graph.step_layout import LayerTimes
from headway.job import Job
from headway.model import ModelSpec, ParameterSpec
from headway.scheduling.mesh import groups_along
from headway.strategies.base import DATA, PIPELINE
from headway.strategies.pipeline.host_order import EXACT, StageDemand, order_for, place
from headway.strategies.pipeline.stage_times import Split, SplitLayer


@dataclass(frozen=True, slots=True)
class LayerStep:
    """One step of a worker that trains the whole model: its layers in forward order, and the time around them.

    ``loss_ns`` lies between forward and backward, ``rest_ns`` outside of both; updating all parameters takes
    ``optimizer_ns``.
    """

    layers: tuple[LayerTimes, ...]
    optimizer_ns: int = 0
    loss_ns: int = 0
    rest_ns: int = 0


@dataclass(frozen=True)
class CutModel:
    """A model that can be split; ``steps(worker)`` are the steps of a worker that trains all of it.

    ``aliases`` maps other names that layers use for parameters to their names in ``spec``.
    """

    spec: ModelSpec
    steps: Callable[[int], Sequence[LayerStep]]
    aliases: Mapping[str, str]
    warm_up_steps: int = 1

    @property
    def layers(self) -> tuple[LayerTimes, ...]:
        """The layers, with the times of one step."""
        return self.steps(0)[0].layers

    def size_bytes(self, parameter: str) -> int:
        """The size of a parameter, by any of its names."""
        return self.spec.by_name[self.aliases.get(parameter, parameter)].size_bytes


def split_layers(model: CutModel, layers: Sequence[LayerTimes], share: float) -> tuple[SplitLayer, ...]:
    """``layers`` with the times and sizes of a micro-batch, a fraction ``share`` of a worker's batch."""
    return tuple(
        SplitLayer(
            layer.module,
            layer.forward_ns * share,
            layer.backward_ns * share,
            parameter_bytes=sum(map(model.size_bytes, layer.parameters)),
            kept_bytes=round(layer.kept_bytes * share),
            cut_bytes=round(layer.cut_bytes * share) or None,
        )
        for layer in layers
    )


def places(
    cluster: Cluster, layers: Sequence[SplitLayer], stages: int, replicas: int, micro_batches: int
) -> Iterator[tuple[dict[str, int], tuple[int, ...]]]:
    """Yield the meshes that are worth a replay, each with an order of hosts.

    ``layers`` are those of a micro-batch; with more ``stages`` than ranks, a rank has several.
    """
    ranks = cluster.world_size // replicas
    cut_bytes = sorted(layer.cut_bytes for layer in layers if layer.cut_bytes)
    demand = StageDemand(
        sum(layer.forward_ns + layer.backward_ns for layer in layers) / ranks,
        cut_bytes[len(cut_bytes) // 2] * (stages // ranks),
        sum(layer.parameter_bytes for layer in layers) / ranks,
        micro_batches,
        loops=stages > ranks,
    )
    as_they_are, ways = tuple(range(len(cluster.hosts))), Ways(cluster)
    meshes = [{PIPELINE: ranks}]
    if replicas > 1:
        meshes = [{PIPELINE: ranks, DATA: replicas}, {DATA: replicas, PIPELINE: ranks}]
    for mesh in meshes:
        yield mesh, as_they_are
        if replicas == 1 and stages == ranks and len(as_they_are) <= EXACT:
            order = place(
                [demand.busy_ns] * len(as_they_are),
                lambda _stage, sender, receiver: ways.message_ns(sender, receiver, demand.message_bytes),
                micro_batches,
            ).workers
        else:
            order = order_for(cluster, groups_along(mesh, PIPELINE), demand)
        if order != as_they_are:
            yield mesh, order


def reordered(cluster: Cluster, order: Sequence[int]) -> Cluster:
    """``cluster`` with its hosts in another order."""
    return cluster.model_copy(update={"hosts": tuple(cluster.hosts[host] for host in order)})


def passing(cluster: Cluster, ranks: Sequence[int]) -> Callable[[int, int], float]:
    """A function (stage, bytes) -> ns: the time of a message to the next stage or back, if ``ranks`` take turns."""
    ways, host_of_rank = Ways(cluster), cluster.host_of_rank

    def passing_ns(stage: int, size_bytes: int) -> float:
        here, there = (host_of_rank[ranks[at % len(ranks)]] for at in (stage, stage + 1))
        return max(ways.message_ns(here, there, size_bytes), ways.message_ns(there, here, size_bytes))

    return passing_ns


def cut_job(
    model: CutModel,
    cluster: Cluster,
    cut: Split,
    micro_batches: int,
    mesh: Mapping[str, int],
    workers: Sequence[int] = (),
    known_ranks: int | None = None,
) -> Job:
    """Build the job of pipelines with these stages along ``mesh`` on ``cluster``.

    Rank ``r`` computes like worker ``workers[r]`` (by default ``r``). A pipeline of S ranks trains on the batches of S
    workers; with more stages than ranks, stage ``s`` is on rank ``s % ranks``. If only the first ``known_ranks`` are
    known, the remaining ranks repeat them in turn.
    """
    stages = len(cut.ends)
    share = mesh[PIPELINE] / micro_batches
    layers = model.layers
    timelines = {}
    for ranks in groups_along(mesh, PIPELINE):
        for first, rank in enumerate(ranks):
            if known_ranks is not None and rank >= known_ranks:
                continue
            steps = model.steps(workers[rank] if workers else rank)
            timelines[rank] = tuple(
                _timeline(
                    model, step, cut, range(first, stages, len(ranks)), micro_batches, share, (rank, number)
                )
                for number, step in enumerate(steps)
            )
    return Job(
        stages=tuple(_stage(model, cut.layers(stage), share) for stage in range(stages)),
        world_size=cluster.world_size,
        cluster=cluster,
        computation=Computation(timelines, warm_up_steps=model.warm_up_steps),
        boundary_bytes=tuple(round(layers[end - 1].cut_bytes * share) for end in cut.ends[:-1]),
        mesh=mesh if len(mesh) > 1 else {},
    )


def _stage(model: CutModel, layer_indices: range, share: float) -> ModelSpec:
    """The model of a stage; parameters shared between stages belong to each of them."""
    spec, layers = model.spec, model.layers
    by_name: dict[str, ParameterSpec] = {}
    for index in layer_indices:
        for name in layers[index].parameters:
            canonical = model.aliases.get(name, name)
            by_name.setdefault(canonical, spec.by_name[canonical].model_copy(update={"name": name}))
    parameters = tuple(by_name.values())
    part = sum(parameter.size_bytes for parameter in parameters) / max(1, spec.size_bytes)
    kept = sum(layers[index].kept_bytes for index in layer_indices)
    if not any(layer.kept_bytes for layer in layers):
        kept = round(spec.activation_bytes * len(layer_indices) / len(layers))
    return ModelSpec(
        parameters=parameters,
        forward_order=tuple(layers[index].module for index in layer_indices),
        ready_order=tuple(parameter.name for parameter in reversed(parameters)),
        buffer_bytes=round(spec.buffer_bytes * part),
        frozen_bytes=round(spec.frozen_bytes * part),
        activation_bytes=round(kept * share),
        optimizer_state_bytes=round(spec.optimizer_state_bytes * part),
    )


def _timeline(
    model: CutModel,
    step: LayerStep,
    cut: Split,
    stages: Sequence[int],
    micro_batches: int,
    share: float,
    at: tuple[int, int],
) -> Timeline:
    """A step of a rank with ``stages``, the update last; ``at`` is (rank, step number)."""
    items: list[Item] = []
    held = 0
    for stage in stages:
        items += _passes(model, step, cut, stage, micro_batches, share)
        layers = [step.layers[index] for index in cut.layers(stage)]
        uses = {model.aliases.get(name, name) for layer in layers for name in layer.parameters}
        held += sum(model.spec.by_name[name].size_bytes for name in uses)
    update_ns = round(step.optimizer_ns * held / max(1, model.spec.size_bytes))
    items += [Item(Point.STEP), Item(Part.OPTIMIZER, "", update_ns)]
    if step.rest_ns:
        items.append(Item(Part.REST, "", step.rest_ns))
    return Timeline(*at, tuple(items))


def _passes(
    model: CutModel, step: LayerStep, cut: Split, stage: int, micro_batches: int, share: float
) -> list[Item]:
    """The passes of a stage: all forwards, then all backwards; the last one makes gradients ready."""
    layers = [step.layers[index] for index in cut.layers(stage)]
    loss_ns = step.loss_ns if stage == len(cut.ends) - 1 else 0
    items = []

    def along(part: str, micro_batch: int, times_ns: Sequence[int]) -> list[Item]:
        """Items whose ends are rounded sums of scaled times, so that rounding errors do not add up."""
        ends = [round(total * share) for total in accumulate(times_ns)]
        lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        return [Item(part, duration_ns=length, stage=stage, micro_batch=micro_batch) for length in lengths]

    forwards = along(Part.FORWARD, 0, [*(layer.forward_ns for layer in layers), loss_ns])
    for layer, stretch in zip(layers, forwards, strict=False):
        items += [Item(Point.USE, name, stage=stage, micro_batch=0) for name in _modules(model, layer)]
        items.append(stretch)
    items.append(forwards[-1])
    for micro_batch in range(1, micro_batches):
        items += along(Part.FORWARD, micro_batch, [sum(layer.forward_ns for layer in layers) + loss_ns])
    for micro_batch in range(micro_batches - 1):
        items += along(Part.BACKWARD, micro_batch, [sum(layer.backward_ns for layer in layers)])
    last = micro_batches - 1
    uses = [model.aliases.get(name, name) for layer in layers for name in layer.parameters]
    stretches = along(Part.BACKWARD, last, [layer.backward_ns for layer in reversed(layers)])
    for layer, stretch in zip(reversed(layers), stretches, strict=True):
        items.append(stretch)
        for name in reversed(layer.parameters):
            canonical = model.aliases.get(name, name)
            uses.remove(canonical)
            if canonical not in uses:
                items.append(Item(Point.READY, name, stage=stage, micro_batch=last))
    items.append(Item(Point.BACKWARD_END, stage=stage, micro_batch=last))
    return items


def _modules(model: CutModel, layer: LayerTimes) -> list[str]:
    """The modules that own the parameters of ``layer``."""
    names = (model.aliases.get(name, name) for name in layer.parameters)
    return list(dict.fromkeys(model.spec.by_name[name].module for name in names))


def tied_bytes(model: CutModel, cut: Split) -> int:
    """The size of the parameters that several stages share."""
    stages_of: dict[str, set[int]] = {}
    for stage in range(len(cut.ends)):
        for index in cut.layers(stage):
            for name in model.layers[index].parameters:
                stages_of.setdefault(model.aliases.get(name, name), set()).add(stage)
    return sum(model.spec.by_name[name].size_bytes for name, on in stages_of.items() if len(on) > 1)


def cut_by_hand(layers: Sequence[SplitLayer], stages: int, points: Sequence[str]) -> Split:
    """The split whose stages begin at the first layers of the modules ``points``. Raises PlanError if impossible."""
    ends = []
    for point in points:
        inside = [i for i, layer in enumerate(layers) if f"{layer.name}.".startswith(f"{point}.")]
        if not inside or not inside[0] or layers[inside[0] - 1].cut_bytes is None:
            raise PlanError(
                "cannot split the model at this split point", got=point,
                expected="a module whose preceding layer has a known output size (cut_bytes)",
            )  # fmt: skip
        ends.append(inside[0])
    if ends != sorted(set(ends)) or len(ends) != stages - 1:
        raise PlanError(
            "split_points do not give the requested number of stages", got=", ".join(points),
            expected=f"{stages - 1} modules in the order in which forward calls them",
        )  # fmt: skip
    return Split((*ends, len(layers)), 0.0, 0.0)
