"""Describes the recorded model, the machine, and the strategy that was in force."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from headway.model import ModelSpec, PassMemory, StageMemory
from headway.passes.optimizer import OptimizerImplementation, as_arguments
from headway.recording.modules import ModuleWatch
from headway.strategies.live.module_spec import model_spec
from headway.strategies.live.runtime import acting
from headway.strategies.plugin import InForce, StrategyPlugin
from headway.strategies.registry import ask
from headway.trace.events import Event, Kind


def describe_model(
    model: nn.Module | None,
    root: nn.Module | None,
    watch: ModuleWatch,
    rows: Iterable[Event],
    optimizers: Sequence[torch.optim.Optimizer],
    memory: PassMemory | None,
) -> ModelSpec:
    """Describe the model ``root``, wrapped as ``model``: its module and gradient orders, memory and optimizer state."""
    if root is None:
        return ModelSpec(parameters=())
    return model_spec(root).model_copy(
        update={
            "forward_order": tuple(dict.fromkeys((*watch.unseen, *watch.forward_order))),
            "ready_order": _last_order(rows),
            "activation_bytes": watch.activation_bytes,
            "pass_memory": memory,
            "optimizer_state_bytes": sum(map(_state_bytes, optimizers)),
            "find_unused_parameters": _finds_unused(model),
            "class_name": type(root).__qualname__[:500],
        }
    )


def describe_machine(root: nn.Module | None) -> dict[str, Any]:
    """The ``RankInfo`` fields for this rank's device, threads, cores and load."""
    parameter = next(root.parameters(), None) if root is not None else None
    return {
        "device": "" if parameter is None else _device_name(parameter.device),
        "threads": torch.get_num_threads(),
        "cores": _runs(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)[:200]
    return device.type


def _runs(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Group sorted numbers into runs of consecutive ones: the first and last of each run."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return tuple(runs)


def describe_stage(
    stage: Any,
    activation_bytes: Mapping[int, int],
    optimizers: Sequence[torch.optim.Optimizer],
    memory: StageMemory | None,
) -> ModelSpec:
    """Describe the model of one pipeline stage. ``activation_bytes`` are what one micro-batch keeps in it."""
    parameters = list(stage.submod.parameters())
    return model_spec(stage.submod).model_copy(
        update={
            "activation_bytes": activation_bytes.get(stage.stage_index, 0),
            "stage_memory": memory,
            "optimizer_state_bytes": sum(_state_bytes(optimizer, parameters) for optimizer in optimizers),
        }
    )


def for_replica(model: ModelSpec, stage: ModelSpec) -> ModelSpec:
    """``model``, a data-parallel pipeline stage, with the activations that one micro-batch keeps in ``stage``."""
    held = {"activation_bytes": stage.activation_bytes, "pass_memory": None}
    return model.model_copy(update=held)


def strategy_in_force(*trained: object) -> tuple[str, InForce]:
    """The name and settings of the strategy that trains one of ``trained``, wrapped models or stages.

    The name is "" if none does. A strategy that builds on another is tried before it.
    """
    for model in map(acting, trained):
        if model is None:
            continue

        def recognised(plugin: StrategyPlugin[Any], model: object = model) -> InForce | None:
            return plugin.recognise(model)

        for name, in_force in ask(recognised, last_first=True):
            if in_force is not None:
                return name, in_force
    return "", InForce({})


def refusals(
    model: nn.Module | None, named_implementations: Mapping[str, bool], *, compiled_around: bool
) -> dict[str, str]:
    """Why strategies and passes cannot be applied to the recorded model, by their names.

    ``named_implementations`` are the optimizer flags (``foreach``, ``fused``) that the script sets.
    ``compiled_around``: compiled code calls the wrapper.
    """
    reasons = {}
    if model is not None:
        acts = acting(model)
        reasons = dict(ask(lambda plugin: plugin.refusal(acts, compiled_around=compiled_around)))
    if named_implementations:
        reasons[OptimizerImplementation.name] = (
            f"the script sets {as_arguments(named_implementations)} itself"
        )
    return {name: why for name, why in reasons.items() if why}


def _finds_unused(model: nn.Module | None) -> bool:
    """Whether DDP looks for unused parameters in every backward; with a static graph it does so once."""
    return bool(getattr(model, "find_unused_parameters", False)) and not getattr(model, "static_graph", False)


def _state_bytes(optimizer: torch.optim.Optimizer, of: Iterable[nn.Parameter] | None = None) -> int:
    """The bytes of the optimizer's state, of all parameters or only those in ``of``."""
    states = (
        optimizer.state.values() if of is None else [optimizer.state.get(parameter, {}) for parameter in of]
    )
    return sum(
        value.numel() * value.element_size()
        for state in states
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def _last_order(rows: Iterable[Event]) -> tuple[str, ...]:
    """Parameters in the order in which their gradients became ready in the last recorded step."""
    ready = [row for row in rows if row.kind == Kind.GRADIENT_READY]
    if not ready:
        return ()
    order = [row.name for row in ready if row.step == ready[-1].step]
    return tuple(reversed(dict.fromkeys(reversed(order))))
