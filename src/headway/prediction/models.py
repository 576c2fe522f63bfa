"""Models by name: those that ship, layer tables in files, and functions that build torch modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from headway.errors import UserError, did_you_mean
from headway.graph.computation import Point
from headway.graph.step_layout import LayerTimes
from headway.models.catalogue import MODELS
from headway.models.roofline import DEVICES, HALF, PRECISIONS, SINGLE, DataSheet
from headway.models.table import FLOAT_BYTES
from headway.prediction.optimizers import OPTIMIZERS, Optimizer
from headway.prediction.table_file import load_table
from headway.prediction.workload import Workload, between, workload_of_table

if TYPE_CHECKING:
    import torch

    from headway.prediction.function import Built

Value = TypeVar("Value")
HERE = "here"
DEFAULT_DEVICE = "a100"
OF_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}


class _Asked(NamedTuple):
    """What computes a model, in which precision, and what updates it. ``precision`` is None where nobody said."""

    device_name: str | None
    precision: str | None
    optimizer: Optimizer

    @property
    def is_here(self) -> bool:
        return self.device_name == HERE

    @property
    def sheet(self) -> DataSheet:
        return _chosen(DEVICES, self.device_name or DEFAULT_DEVICE, "--device")

    def precision_of(self, dtypes: Iterable[str]) -> tuple[str, bool]:
        """The precision in which parameters of such types are computed with, and whether that is mixed precision."""
        kinds = {OF_DTYPES.get(dtype, SINGLE) for dtype in dtypes}
        stored = kinds.pop() if len(kinds) == 1 else SINGLE
        if stored == SINGLE:
            precision = self.precision or SINGLE
            return precision, precision in HALF
        if self.precision not in (None, stored):
            raise UserError(
                "--precision contradicts the model, whose parameters are stored otherwise",
                got=f"--precision {self.precision}", expected=f"--precision {stored}, or none",
            )  # fmt: skip
        return stored, False

    def notes(self) -> tuple[str, ...]:
        """What is to be said of a precision that nobody chose."""
        tensor = [each for each in HALF if each in self.sheet.flops_per_s]
        if self.precision is not None or not tensor:
            return ()
        return (
            f"Computed in fp32 without tensor cores, as nothing else was said; what most jobs use is --precision "
            f"{tensor[0]}.",
        )


def workload_named(
    text: str,
    device_name: str | None,
    optimizer_name: str,
    samples: int | None = None,
    precision: str | None = None,
) -> Workload:
    """What ``text`` names, timed on ``device_name`` for a batch of ``samples``, or its own.

    Raises UserError for what there is not.
    """
    return workloads_named(text, device_name, optimizer_name, (samples,), precision)[samples]


def workloads_named(
    text: str,
    device_name: str | None,
    optimizer_name: str,
    batches: Iterable[int | None],
    precision: str | None = None,
) -> dict[int | None, Workload]:
    """What ``text`` names at each of ``batches``, which are samples a worker; None is the model's own batch.

    ``precision`` is one of ``PRECISIONS``; by default the parameters' own. Raises UserError for what there is not.
    """
    if precision is not None:
        _chosen(dict.fromkeys(PRECISIONS), precision, "--precision")
    asked = _Asked(device_name, precision, _chosen(OPTIMIZERS, optimizer_name, "--optimizer"))
    wanted = dict.fromkeys(batches)
    if text in MODELS:
        if asked.is_here:
            raise UserError(
                f"{text} is a table of layers, which cannot be timed",
                expected=f"--device {' or '.join(DEVICES)}",
            )
        return {samples: _that_ships(text, asked, samples) for samples in wanted}
    if Path(text).suffix in (".yaml", ".yml"):
        return {samples: _of_file(Path(text), asked, samples) for samples in wanted}
    if ":" in text:
        return _of_function(text, asked, list(wanted))
    raise UserError(
        "there is no such model", got=repr(text),
        expected=f"one of {', '.join(MODELS)}, a YAML file, or package.module:function",
        fix=did_you_mean(text, MODELS),
    )  # fmt: skip


def batch_of(workers: int, batch: int | None, global_batch: int | None) -> int | None:
    """How many samples each of ``workers`` trains on in a step; None for as many as the model's own batch has.

    Raises UserError where ``global_batch`` cannot be shared out.
    """
    if global_batch is None:
        return batch
    if batch is not None:
        raise UserError("--batch and --global-batch do not go together", expected="one of them")
    if global_batch % workers:
        few = global_batch < workers
        raise UserError(
            "--global-batch has fewer samples than there are workers" if few
            else "--global-batch does not divide among the workers",
            got=f"{global_batch} samples for {workers} workers",
            expected=f"a multiple of {workers}", fix="Give world sizes that divide it with --workers.",
        )  # fmt: skip
    return global_batch // workers


def _chosen(known: Mapping[str, Value], name: str, option: str) -> Value:
    if name not in known:
        raise UserError(
            f"{option}: unknown name", got=repr(name), expected=f"one of {', '.join(known)}",
            fix=did_you_mean(name, known),
        )  # fmt: skip
    return known[name]


def _that_ships(name: str, asked: _Asked, samples: int | None) -> Workload:
    table = MODELS[name]() if samples is None else MODELS[name](samples=samples)
    workload = workload_of_table(table, asked.sheet, asked.optimizer, asked.precision or SINGLE)
    return replace(workload, notes=asked.notes())


def _of_file(path: Path, asked: _Asked, samples: int | None) -> Workload:
    table = load_table(path)
    if table.needs_device and asked.device_name is None:
        raise UserError(
            f"layer table {path} gives work rather than times for some layers",
            got="no --device",
            expected=f"--device {' or '.join(DEVICES)}",
        )
    if asked.precision is not None and not table.needs_device:
        raise UserError(f"layer table {path} gives times, which have their precision", got="--precision")
    precision, is_mixed = asked.precision_of((table.dtype,))
    device = asked.sheet.at(precision if table.needs_device else SINGLE)
    samples = samples or table.samples
    times, notes = f"as in {path.name}", asked.notes() if precision == SINGLE else ()
    if not table.needs_device:
        notes = ()
    else:
        times = f"{device.name} in {precision}"
    if table.fixed_part_is_unknown and samples != table.samples:
        notes += (
            f"Times of layers in {path.name} are taken in proportion to the batch; give them at two batch sizes, as "
            "in forward_ms: {32: 0.8, 64: 1.4}, and their fixed part counts.",
        )
    workload = Workload(
        name=table.name,
        batch=f"{samples} samples",
        samples=samples,
        times=times,
        times_error=device.error if table.needs_device else 0.0,
        spec=table.spec(samples, halved=is_mixed),
        layers=table.times(device, samples, halved=is_mixed),
        notes=notes,
    )
    return workload.trained_by(asked.optimizer, asked.sheet.at().bytes_per_s)


def _of_function(text: str, asked: _Asked, batches: list[int | None]) -> dict[int | None, Workload]:
    """At most two batches are costed, or timed; others follow from them."""
    sizes = sorted(samples for samples in batches if samples is not None)
    if len(batches) < 2 or not (asked.is_here or len(sizes) > 2):
        return {samples: _function_at(text, asked, samples) for samples in batches}
    found: dict[int | None, Workload] = {}
    if None in batches or asked.is_here:
        found[None] = _function_at(text, asked, None)
    if asked.is_here:
        return found | _timed_at(text, asked, sizes, found[None])
    few, many = (_function_at(text, asked, samples) for samples in (sizes[0], sizes[-1]))
    return found | {samples: between(few, many, samples) for samples in sizes}


def _timed_at(text: str, asked: _Asked, sizes: list[int], at_own: Workload) -> dict[int | None, Workload]:
    """Times from the function's own batch, which fits on the device, and a smaller one; memory without any device."""
    if at_own.samples == 1:
        raise UserError(
            f"{text}: one sample is not enough to time two batch sizes",
            expected="a batch of two samples or more",
        )
    smaller = min(sizes[0], at_own.samples // 2)
    timed = _function_at(text, asked, smaller)
    modelled = _of_function(text, asked._replace(device_name=DEFAULT_DEVICE), list(sizes))
    return {
        samples: replace(
            line := between(timed, at_own, samples),
            spec=line.spec.model_copy(update={"pass_memory": modelled[samples].spec.pass_memory}),
        )
        for samples in sizes
    }


def _function_at(text: str, asked: _Asked, samples: int | None) -> Workload:
    import torch

    from headway import torch_private
    from headway.prediction.costing import LayerWork
    from headway.prediction.function import Built, function_named
    from headway.prediction.memory import on_fake_tensors, pass_memory_of
    from headway.prediction.timing import bytes_per_s_of, timed_layers
    from headway.strategies.live.module_spec import model_spec

    here = torch_private.compute_device()
    make = function_named(text)
    built = Built(text, make, here if asked.is_here else torch.device("meta"), samples)
    spec = model_spec(built.module)
    precision, is_mixed = asked.precision_of(parameter.dtype for parameter in spec.parameters)
    if asked.is_here and precision == "tf32":
        raise UserError(
            "--precision tf32 is not for --device here", expected="--precision bf16 or fp16, or none",
            fix="Set torch.set_float32_matmul_precision in the function.",
        )  # fmt: skip
    built.autocast(_dtype(precision) if is_mixed else None)
    notes: tuple[str, ...] = ()
    if asked.is_here:
        LayerWork(built)  # a first pass, which meets faults of the module
        layers, error = timed_layers(built)
        times, bytes_per_s = f"timed on this machine ({here})", bytes_per_s_of(here)
    else:
        layers, error = _costed(built, asked.sheet, precision, is_mixed=is_mixed)
        times, bytes_per_s = f"{asked.sheet.at(precision).name} in {precision}", asked.sheet.at().bytes_per_s
        notes = asked.notes() if precision == SINGLE else ()
    workload = Workload(
        name=text, batch=built.batch, samples=built.samples, times=times, spec=spec, layers=layers,
        times_error=error, notes=notes,
    )  # fmt: skip
    watched = built
    if not asked.is_here:
        watched = on_fake_tensors(text, make, samples)
        watched.autocast(_dtype(precision) if is_mixed else None)
    learned = {
        "forward_order": tuple(layer.module for layer in layers),
        "ready_order": tuple(item.name for item in workload.timeline().items if item.kind == Point.READY),
        "pass_memory": pass_memory_of(watched),
    }
    return replace(workload, spec=spec.model_copy(update=learned)).trained_by(asked.optimizer, bytes_per_s)


def _dtype(precision: str) -> torch.dtype:
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def _costed(
    built: Built, sheet: DataSheet, precision: str, *, is_mixed: bool
) -> tuple[tuple[LayerTimes, ...], float]:
    """Modelled times of layers, and by which share they may be off."""
    from headway.prediction.costing import LayerWork

    device, owned = sheet.at(precision), built.layers
    numel = {name: parameter.numel() for name, parameter in built.module.named_parameters()}
    layers = []
    for name, work in LayerWork(built).work.items():
        own_bytes = FLOAT_BYTES * sum(numel[parameter] for parameter in owned[name])
        forward_s = device.forward_s(work.halved(own_bytes) if is_mixed else work)
        backward_s = forward_s * device.backward_factor
        layers.append(LayerTimes(name, owned[name], round(forward_s * 1e9), round(backward_s * 1e9)))
    return tuple(layers), device.error
