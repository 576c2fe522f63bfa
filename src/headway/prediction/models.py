"""Models by name: those that ship, layer tables in files, and functions that build torch modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from headway.errors import UserError, did_you_mean
from headway.graph.step_profile import LayerTimes
from headway.graph.timeline import Point
from headway.models.catalogue import MODELS
from headway.models.roofline import DEVICES, MODELLED_ERROR
from headway.prediction.optimizers import OPTIMIZERS, Optimizer
from headway.prediction.table_file import load_table
from headway.prediction.workload import Workload, workload_of_table

Value = TypeVar("Value")
HERE = "here"
DEFAULT_DEVICE = "a100"


def workload_named(text: str, device_name: str | None, optimizer_name: str) -> Workload:
    """What ``text`` names, timed on ``device_name``. Raises UserError for what there is not."""
    optimizer = _chosen(OPTIMIZERS, optimizer_name, "--optimizer")
    if text in MODELS:
        if device_name == HERE:
            raise UserError(
                f"{text} is a table of layers, which cannot be timed",
                expected=f"--device {' or '.join(DEVICES)}",
            )
        device = _chosen(DEVICES, device_name or DEFAULT_DEVICE, "--device")
        return workload_of_table(MODELS[text](), device, optimizer)
    if Path(text).suffix in (".yaml", ".yml"):
        return _of_file(Path(text), device_name, optimizer)
    if ":" in text:
        return _of_function(text, device_name, optimizer)
    raise UserError(
        "there is no such model", got=repr(text),
        expected=f"one of {', '.join(MODELS)}, a YAML file, or package.module:function",
        fix=did_you_mean(text, MODELS),
    )  # fmt: skip


def _chosen(known: Mapping[str, Value], name: str, option: str) -> Value:
    if name not in known:
        raise UserError(
            f"{option}: unknown name", got=repr(name), expected=f"one of {', '.join(known)}",
            fix=did_you_mean(name, known),
        )  # fmt: skip
    return known[name]


def _of_file(path: Path, device_name: str | None, optimizer: Optimizer) -> Workload:
    table = load_table(path)
    if table.needs_device and device_name is None:
        raise UserError(
            f"layer table {path} gives work rather than times for some layers",
            got="no --device",
            expected=f"--device {' or '.join(DEVICES)}",
        )
    device = _chosen(DEVICES, device_name or DEFAULT_DEVICE, "--device")
    workload = Workload(
        name=table.name,
        batch=f"{table.samples} samples",
        samples=table.samples,
        times=device.name if table.needs_device else f"as in {path.name}",
        times_error=MODELLED_ERROR if table.needs_device else 0.0,
        spec=table.spec,
        layers=table.times(device),
    )
    return workload.trained_by(optimizer, device.bytes_per_s)


def _of_function(text: str, device_name: str | None, optimizer: Optimizer) -> Workload:
    import torch

    from headway import torch_private
    from headway.prediction.costing import LayerWork
    from headway.prediction.function import Built, function_named
    from headway.prediction.memory import on_fake_tensors, pass_memory_of
    from headway.prediction.timing import bytes_per_s_of, timed_layers
    from headway.strategies.data_parallel.module_spec import model_spec

    here = torch_private.device_here()
    on = here if device_name == HERE else torch.device("meta")
    make = function_named(text)
    built = Built(text, make, on)
    costed = LayerWork(built)
    if device_name == HERE:
        layers, error = timed_layers(built)
        times, bytes_per_s = f"timed on this machine ({here})", bytes_per_s_of(here)
    else:
        device = _chosen(DEVICES, device_name or DEFAULT_DEVICE, "--device")
        owned = built.layers
        forwards_s = {name: device.forward_s(work) for name, work in costed.work.items()}
        layers = tuple(
            LayerTimes(name, owned[name], round(s * 1e9), round(s * device.backward_factor * 1e9))
            for name, s in forwards_s.items()
        )
        times, bytes_per_s, error = device.name, device.bytes_per_s, MODELLED_ERROR
    spec = model_spec(built.module)
    workload = Workload(
        name=text, batch=built.batch, samples=built.samples, times=times, spec=spec, layers=layers,
        times_error=error,
    )  # fmt: skip
    learned = {
        "forward_order": tuple(layer.module for layer in layers),
        "ready_order": tuple(item.name for item in workload.timeline().items if item.kind == Point.READY),
        "pass_memory": pass_memory_of(built if device_name == HERE else on_fake_tensors(text, make)),
    }
    return replace(workload, spec=spec.model_copy(update=learned)).trained_by(optimizer, bytes_per_s)
