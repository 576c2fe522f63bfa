"""Loads the model of ``headway predict``: a bundled model, a layer table, or a function that builds a torch module."""

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


class _ModelRequest(NamedTuple):
    """The requested device, precision (None if not given) and optimizer."""

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
        """The precision of the computation for these parameter types, and whether it is mixed precision."""
        kinds = {OF_DTYPES.get(dtype, SINGLE) for dtype in dtypes}
        stored = kinds.pop() if len(kinds) == 1 else SINGLE
        if stored == SINGLE:
            precision = self.precision or SINGLE
            return precision, precision in HALF
        if self.precision not in (None, stored):
            raise UserError(
                "--precision does not match the type of the model's parameters",
                got=f"--precision {self.precision}", expected=f"--precision {stored}, or none",
            )  # fmt: skip
        return stored, False

    def notes(self) -> tuple[str, ...]:
        """A note about the default precision, if none was chosen."""
        tensor = [
            candidate_precision
            for candidate_precision in HALF
            if candidate_precision in self.sheet.flops_per_s
        ]
        if self.precision is not None or not tensor:
            return ()
        return (
            f"Computed in fp32 without tensor cores, the default; most jobs use --precision {tensor[0]}.",
        )


def workload_named(
    text: str,
    device_name: str | None,
    optimizer_name: str,
    samples: int | None = None,
    precision: str | None = None,
) -> Workload:
    """The workload of the model ``text`` on ``device_name``, for a batch of ``samples`` (default: the model's own).

    Raises UserError for an unknown model, device, optimizer or precision.
    """
    return workloads_named(text, device_name, optimizer_name, (samples,), precision)[samples]


def workloads_named(
    text: str,
    device_name: str | None,
    optimizer_name: str,
    batches: Iterable[int | None],
    precision: str | None = None,
) -> dict[int | None, Workload]:
    """The workload of the model ``text`` for each of ``batches`` (samples per worker; None is the model's own).

    ``precision`` is one of ``PRECISIONS``, by default that of the parameters. Raises UserError for an unknown model,
    device, optimizer or precision.
    """
    if precision is not None:
        _chosen(dict.fromkeys(PRECISIONS), precision, "--precision")
    request = _ModelRequest(device_name, precision, _chosen(OPTIMIZERS, optimizer_name, "--optimizer"))
    wanted = dict.fromkeys(batches)
    if text in MODELS:
        if request.is_here:
            raise UserError(
                f"{text} is a table of layers and cannot be timed",
                expected=f"--device {' or '.join(DEVICES)}",
            )
        return {samples: _that_ships(text, request, samples) for samples in wanted}
    if Path(text).suffix in (".yaml", ".yml"):
        return {samples: _of_file(Path(text), request, samples) for samples in wanted}
    if ":" in text:
        return _of_function(text, request, list(wanted))
    raise UserError(
        "unknown model", got=repr(text),
        expected=f"one of {', '.join(MODELS)}, a YAML file, or package.module:function",
        fix=did_you_mean(text, MODELS),
    )  # fmt: skip


def batch_of(workers: int, batch: int | None, global_batch: int | None) -> int | None:
    """The samples per worker and step; None for the model's own batch.

    Raises UserError if ``global_batch`` does not divide among ``workers``.
    """
    if global_batch is None:
        return batch
    if batch is not None:
        raise UserError("--batch and --global-batch exclude each other", expected="one of them")
    if global_batch % workers:
        few = global_batch < workers
        raise UserError(
            "--global-batch is smaller than the number of workers" if few
            else "--global-batch does not divide among the workers",
            got=f"{global_batch} samples for {workers} workers",
            expected=f"a multiple of {workers}", fix="Use --workers with divisors of it.",
        )  # fmt: skip
    return global_batch // workers


def _chosen(choices: Mapping[str, Value], name: str, option: str) -> Value:
    if name not in choices:
        raise UserError(
            f"{option}: unknown name", got=repr(name), expected=f"one of {', '.join(choices)}",
            fix=did_you_mean(name, choices),
        )  # fmt: skip
    return choices[name]


def _that_ships(name: str, request: _ModelRequest, samples: int | None) -> Workload:
    table = MODELS[name]() if samples is None else MODELS[name](samples=samples)
    workload = workload_of_table(table, request.sheet, request.optimizer, request.precision or SINGLE)
    return replace(workload, notes=request.notes())


def _of_file(path: Path, request: _ModelRequest, samples: int | None) -> Workload:
    table = load_table(path)
    if table.needs_device and request.device_name is None:
        raise UserError(
            f"layer table {path} has no times for some layers, only work",
            got="no --device",
            expected=f"--device {' or '.join(DEVICES)}",
        )
    if request.precision is not None and not table.needs_device:
        raise UserError(
            f"layer table {path} has fixed times, so the precision cannot change", got="--precision"
        )
    precision, is_mixed = request.precision_of((table.dtype,))
    device = request.sheet.at(precision if table.needs_device else SINGLE)
    samples = samples or table.samples
    times, notes = f"as in {path.name}", request.notes() if precision == SINGLE else ()
    if not table.needs_device:
        notes = ()
    else:
        times = f"{device.name} in {precision}"
    if table.fixed_part_is_unknown and samples != table.samples:
        notes += (
            f"Times of layers in {path.name} are assumed proportional to the batch. To include their fixed part, give "
            "them for two batch sizes, as in forward_ms: {32: 0.8, 64: 1.4}.",
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
    return workload.trained_by(request.optimizer, request.sheet.at().bytes_per_s)


def _of_function(text: str, request: _ModelRequest, batches: list[int | None]) -> dict[int | None, Workload]:
    """Cost or time at most two batches, and interpolate the rest."""
    sizes = sorted(samples for samples in batches if samples is not None)
    if len(batches) < 2 or not (request.is_here or len(sizes) > 2):
        return {samples: _function_at(text, request, samples) for samples in batches}
    by_batch: dict[int | None, Workload] = {}
    if None in batches or request.is_here:
        by_batch[None] = _function_at(text, request, None)
    if request.is_here:
        return by_batch | _timed_at(text, request, sizes, by_batch[None])
    few, many = (_function_at(text, request, samples) for samples in (sizes[0], sizes[-1]))
    return by_batch | {samples: between(few, many, samples) for samples in sizes}


def _timed_at(
    text: str, request: _ModelRequest, sizes: list[int], at_own: Workload
) -> dict[int | None, Workload]:
    """Times from the function's own batch and a smaller one, which both fit on the device; memory from fake tensors."""
    if at_own.samples == 1:
        raise UserError(
            f"{text}: timing two batch sizes needs at least two samples",
            expected="a batch of two samples or more",
        )
    smaller = min(sizes[0], at_own.samples // 2)
    timed = _function_at(text, request, smaller)
    modelled = _of_function(text, request._replace(device_name=DEFAULT_DEVICE), list(sizes))
    return {
        samples: replace(
            line := between(timed, at_own, samples),
            spec=line.spec.model_copy(update={"pass_memory": modelled[samples].spec.pass_memory}),
        )
        for samples in sizes
    }


def _function_at(text: str, request: _ModelRequest, samples: int | None) -> Workload:
    import torch

    from headway import torch_private
    from headway.prediction.costing import LayerWork
    from headway.prediction.function import Built, function_named
    from headway.prediction.memory import on_fake_tensors, pass_memory_of
    from headway.prediction.timing import bytes_per_s_of, timed_layers
    from headway.strategies.live.module_spec import model_spec

    here = torch_private.compute_device()
    make = function_named(text)
    built = Built(text, make, here if request.is_here else torch.device("meta"), samples)
    spec = model_spec(built.module)
    precision, is_mixed = request.precision_of(parameter.dtype for parameter in spec.parameters)
    if request.is_here and precision == "tf32":
        raise UserError(
            "--device here does not support --precision tf32", expected="--precision bf16 or fp16, or none",
            fix="Set torch.set_float32_matmul_precision in the function.",
        )  # fmt: skip
    built.autocast(_dtype(precision) if is_mixed else None)
    notes: tuple[str, ...] = ()
    if request.is_here:
        LayerWork(built)  # a first pass that exposes faults of the module
        layers, error = timed_layers(built)
        times, bytes_per_s = f"timed on this machine ({here})", bytes_per_s_of(here)
    else:
        layers, error = _costed(built, request.sheet, precision, is_mixed=is_mixed)
        times, bytes_per_s = (
            f"{request.sheet.at(precision).name} in {precision}",
            request.sheet.at().bytes_per_s,
        )
        notes = request.notes() if precision == SINGLE else ()
    workload = Workload(
        name=text, batch=built.batch, samples=built.samples, times=times, spec=spec, layers=layers,
        times_error=error, notes=notes,
    )  # fmt: skip
    watched = built
    if not request.is_here:
        watched = on_fake_tensors(text, make, samples)
        watched.autocast(_dtype(precision) if is_mixed else None)
    learned = {
        "forward_order": tuple(layer.module for layer in layers),
        "ready_order": tuple(item.name for item in workload.timeline().items if item.kind == Point.READY),
        "pass_memory": pass_memory_of(watched),
    }
    return replace(workload, spec=spec.model_copy(update=learned)).trained_by(request.optimizer, bytes_per_s)


def _dtype(precision: str) -> torch.dtype:
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def _costed(
    built: Built, sheet: DataSheet, precision: str, *, is_mixed: bool
) -> tuple[tuple[LayerTimes, ...], float]:
    """Modelled times of layers, and their relative error."""
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
