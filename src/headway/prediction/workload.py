"""Describes what one worker computes in a step, and lays it out as a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headway.cluster import Cluster
from headway.graph.computation import Computation, Item, Part, Point, Timeline
from headway.graph.step_layout import LayerTimes
from headway.job import Job
from headway.model import ModelSpec
from headway.models.roofline import HALF, SINGLE, DataSheet, layer_times
from headway.models.table import LayerTable, at_batch
from headway.prediction.optimizers import Optimizer

WARM_UP_STEPS = 3
LEAST_SHARE = 0.1


@dataclass(frozen=True)
class Workload:
    """A model with the times of its layers on some device.

    ``samples`` is the batch of one worker and ``batch`` its description. ``times`` describes the source of the times,
    and ``times_error`` is their common relative error. ``layers`` are in the order of forward. ``notes`` say what the
    times leave out.
    """

    name: str
    batch: str
    samples: int
    times: str
    spec: ModelSpec
    layers: tuple[LayerTimes, ...] = field(repr=False)
    optimizer_ns: int = 0
    times_error: float = 0.0
    notes: tuple[str, ...] = ()

    def trained_by(self, optimizer: Optimizer, bytes_per_s: float) -> Workload:
        """The workload with the state and update of ``optimizer``, on a device with this memory bandwidth."""
        size_bytes = self.spec.size_bytes
        held: dict[str, object] = {"optimizer_state_bytes": optimizer.state_bytes(size_bytes)}
        if self.spec.pass_memory is not None:
            update = {"update_bytes": optimizer.update_bytes(size_bytes)}
            held["pass_memory"] = self.spec.pass_memory.model_copy(update=update)
        spec = self.spec.model_copy(update=held)
        return replace(self, spec=spec, optimizer_ns=optimizer.update_ns(size_bytes, bytes_per_s))

    def corrected(self, factor: float, fixed_ns: float, times_error: float) -> Workload:
        """The workload with computation scaled by ``factor``, plus ``fixed_ns`` per step (may be negative).

        ``fixed_ns`` is spread over layers in proportion to their times; at least ``LEAST_SHARE`` of the time remains.
        """
        passes_ns = self.computation_ns - self.optimizer_ns
        passes = max(LEAST_SHARE * factor, factor + fixed_ns / max(1, passes_ns))
        layers = tuple(
            replace(
                layer,
                forward_ns=round(layer.forward_ns * passes),
                backward_ns=round(layer.backward_ns * passes),
            )
            for layer in self.layers
        )
        update_ns = round(self.optimizer_ns * factor)
        return replace(
            self, layers=layers, optimizer_ns=update_ns, times_error=min(times_error, self.times_error)
        )

    @property
    def passes_ns(self) -> int:
        """The time of forward and backward of one step."""
        return sum(layer.forward_ns + layer.backward_ns for layer in self.layers)

    @property
    def computation_ns(self) -> int:
        """The time of one step without communication."""
        return self.passes_ns + self.optimizer_ns

    def job(self, cluster: Cluster) -> Job:
        """The job on ``cluster`` with identical workers: some warm-up steps, then the step that counts."""
        steps = Computation({0: (self.timeline(),)}, warm_up_steps=WARM_UP_STEPS)
        return Job((self.spec,), cluster.world_size, cluster, steps)

    def timeline(self, rank: int = 0, step: int = 0) -> Timeline:
        """One step of a worker: forward, backward in reverse order, then the update.

        A gradient is ready when its layer's backward ends; a shared parameter when the first layer's backward ends.
        """
        items: list[Item] = []
        for layer in self.layers:
            items += [Item(Point.USE, layer.module), Item(Part.FORWARD, "", layer.forward_ns)]
        uses = _uses(self.layers)
        for layer in reversed(self.layers):
            items.append(Item(Part.BACKWARD, "", layer.backward_ns))
            for parameter in reversed(layer.parameters):
                uses[parameter] -= 1
                if uses[parameter] == 0:
                    items.append(Item(Point.READY, parameter))
        items += [Item(Point.BACKWARD_END), Item(Point.STEP), Item(Part.OPTIMIZER, "", self.optimizer_ns)]
        return Timeline(rank, step, tuple(items))


def _uses(layers: Sequence[LayerTimes]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for layer in layers:
        for parameter in layer.parameters:
            counts[parameter] = counts.get(parameter, 0) + 1
    return counts


def workload_of_table(
    table: LayerTable, sheet: DataSheet, optimizer: Optimizer, precision: str = SINGLE
) -> Workload:
    """The workload of a published model on a modelled device. Raises UserError for an unsupported precision."""
    device = sheet.at(precision)
    if precision in HALF:
        table = table.halved()
    layers = tuple(
        LayerTimes(
            layer.name,
            (*(layer.full_name(parameter) for parameter in layer.parameters), *layer.tied),
            round(times.forward_s * 1e9),
            round(times.backward_s * 1e9),
            kept_bytes=round(layer.work.kept_bytes),
            cut_bytes=round(layer.cut_bytes),
        )
        for layer, times in zip(table.layers, layer_times(table, device), strict=True)
    )
    workload = Workload(
        name=table.name,
        batch=table.batch,
        samples=table.samples,
        times=f"{device.name} in {precision}",
        spec=table.spec,
        layers=layers,
        times_error=device.error,
    )
    return workload.trained_by(optimizer, sheet.at().bytes_per_s)


def between(few: Workload, many: Workload, samples: int) -> Workload:
    """Interpolate the workload at a batch of ``samples`` linearly between two known batches."""

    def line(low: float, high: float) -> int:
        return round(at_batch({few.samples: low, many.samples: high}, samples))

    layers = tuple(
        replace(
            low,
            forward_ns=line(low.forward_ns, high.forward_ns),
            backward_ns=line(low.backward_ns, high.backward_ns),
            kept_bytes=line(low.kept_bytes, high.kept_bytes),
            cut_bytes=line(low.cut_bytes, high.cut_bytes),
        )
        for low, high in zip(few.layers, many.layers, strict=True)
    )
    spec, low, high = few.spec, few.spec.pass_memory, many.spec.pass_memory
    if low is not None and high is not None:
        held = low.model_copy(
            update={
                "forward_bytes": line(low.forward_bytes, high.forward_bytes),
                "after_bytes": line(low.after_bytes, high.after_bytes),
                "backward": tuple(
                    (name, line(of_few, dict(high.backward).get(name, of_few)))
                    for name, of_few in low.backward
                ),
                "modules": (),
            }
        )
        spec = spec.model_copy(update={"pass_memory": held})
    batch = f"{samples} samples"
    error = max(few.times_error, many.times_error)
    return replace(few, batch=batch, samples=samples, spec=spec, layers=layers, times_error=error)
