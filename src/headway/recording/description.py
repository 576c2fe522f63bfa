"""What a recording says of the model and of the strategy that was in force."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from headway import torch_private
from headway.errors import UserError
from headway.model import ModelSpec, PassMemory
from headway.recording.modules import ModuleWatch
from headway.strategies.data_parallel.decoupled.checks import check_module
from headway.strategies.data_parallel.decoupled.policy import options_of
from headway.strategies.data_parallel.decoupled.refused import refuse_options
from headway.strategies.data_parallel.decoupled.runtime import DecoupledDataParallel
from headway.strategies.data_parallel.module_spec import model_spec
from headway.strategies.data_parallel.parameter_server.runtime import strategy_of
from headway.trace.events import Event, Kind


def model_described(
    model: nn.Module | None,
    root: nn.Module | None,
    watch: ModuleWatch,
    rows: Iterable[Event],
    optimizer: torch.optim.Optimizer | None,
    memory: PassMemory | None,
) -> ModelSpec:
    """The model of ``root``, with the orders of its last recorded step and what it and its optimizer hold.

    ``model`` is what it is wrapped in.
    """
    if root is None:
        return ModelSpec(parameters=())
    return model_spec(root).model_copy(
        update={
            "forward_order": tuple(dict.fromkeys((*watch.unseen, *watch.forward_order))),
            "ready_order": _last_order(rows),
            "activation_bytes": watch.activation_bytes,
            "pass_memory": memory,
            "optimizer_state_bytes": 0 if optimizer is None else _state_bytes(optimizer),
            "find_unused_parameters": _finds_unused(model),
        }
    )


def strategy_in_force(model: nn.Module | None) -> tuple[tuple[tuple[str, ...], ...], dict[str, Any]]:
    """The buckets of a wrapped model, by the names of their parameters, and its strategy with the options."""
    if model is None:
        return (), {}
    if isinstance(model, DecoupledDataParallel):
        # The engine's, which an optimizer may have had gather gradients after all.
        schedule = model.schedule if model.engine is None else model.engine.schedule
        buckets = tuple(bucket.parameters for bucket in schedule.buckets)
        return buckets, {"decoupled": options_of(schedule, model_spec(model.module))}
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    names = [name for name, p in model.module.named_parameters() if p.requires_grad]
    buckets = tuple(tuple(names[i] for i in bucket) for bucket in torch_private.ddp_buckets(model))
    planned = strategy_of(model)
    if planned is not None:
        return buckets, {planned.name: planned.model_dump(mode="json")}
    return buckets, {"ddp": {"bucket_cap_mb": torch_private.ddp_bucket_cap_mb(model)}}


def why_not_decoupled(model: nn.Module | None, *, compiled_around: bool) -> str:
    """Why the decoupled all-reduce would refuse to take the place of a recorded model's wrapper; "" where it would not.

    ``compiled_around`` says that code was compiled which calls the wrapper.
    """
    if model is None or isinstance(model, DecoupledDataParallel):
        return ""
    if compiled_around:
        return "the model was compiled after it was wrapped"
    try:
        check_module(cast("nn.Module", model.module))
        refuse_options(
            static_graph=getattr(model, "static_graph", False),
            mixed_precision=getattr(model, "mixed_precision", None),
        )
    except UserError as refusal:
        return str(refusal).partition(". ")[0]
    return ""


def _finds_unused(model: nn.Module | None) -> bool:
    """Whether each backward finds out what was used; with a static graph DDP does so once."""
    return bool(getattr(model, "find_unused_parameters", False)) and not getattr(model, "static_graph", False)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def _last_order(rows: Iterable[Event]) -> tuple[str, ...]:
    """Parameters in the order in which the last recorded step's last backward finished them."""
    ready = [row for row in rows if row.kind == Kind.GRADIENT_READY]
    if not ready:
        return ()
    order = [row.name for row in ready if row.step == ready[-1].step]
    return tuple(reversed(dict.fromkeys(reversed(order))))
