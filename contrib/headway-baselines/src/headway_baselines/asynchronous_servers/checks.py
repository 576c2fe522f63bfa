"""What asynchronous servers refuse of a model and of its optimizer."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from headway.errors import UnsupportedError
from headway.strategies.decoupled.granularity import UpdateGranularity, granularity_of
from headway.strategies.live.module_spec import check_dense_gradients
from headway_baselines.asynchronous_servers.shard import options_of


def check_parameters(module: nn.Module) -> None:
    """Raise UnsupportedError for parameters that cannot lie in shards, and for sparse gradients."""
    check_dense_gradients(module, "Leave out sparse=True, or use ddp.")
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and (parameter.device.type != "cpu" or not parameter.is_contiguous()):
            raise UnsupportedError(
                "the asynchronous parameter server is for contiguous parameters on the CPU",
                got=f"{name} on {parameter.device}", fix="Use ddp or decoupled.",
            )  # fmt: skip


def check_optimizer(optimizer: Optimizer, own: Mapping[str, torch.Tensor]) -> None:
    """Raise UnsupportedError unless servers can take the place of ``optimizer`` for ``own``, the parameters by name."""
    if granularity_of(optimizer) is not UpdateGranularity.ELEMENTWISE:
        raise UnsupportedError(
            "an optimizer's update cannot be taken apart among servers", got=type(optimizer).__name__,
            expected="an optimizer of torch.optim that updates each element by itself, such as SGD or Adam",
        )  # fmt: skip
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not all(id(parameter) in updated for parameter in own.values()):
        raise UnsupportedError(
            "the optimizer leaves parameters out that require a gradient", got=type(optimizer).__name__,
            fix="Have them require none.",
        )  # fmt: skip
    _check_stateless(optimizer)
    _check_options(optimizer)


def check_before_step(optimizer: Optimizer) -> None:
    """Raise UnsupportedError where a step would do what servers do not know of."""
    _check_stateless(optimizer)
    _check_unscaled(optimizer)


def _check_stateless(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        if float(state.get("step", 0)) > 0 or state.get("momentum_buffer") is not None:
            raise UnsupportedError(
                "the optimizer has a state, and servers begin without", got=type(optimizer).__name__,
                fix="Construct it anew, and load no state into it.",
            )  # fmt: skip


def _check_unscaled(optimizer: Optimizer) -> None:
    """A ``GradScaler`` leaves it to fused optimizers to unscale gradients and to leave out steps that overflow."""
    if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
        raise UnsupportedError(
            "a GradScaler with a fused optimizer has servers take scaled gradients", got=type(optimizer).__name__,
            fix="Construct the optimizer with fused=False, or train in bfloat16 without a scaler.",
        )  # fmt: skip


def _check_options(optimizer: Optimizer) -> None:
    for group in options_of(optimizer):
        for name, value in group.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise UnsupportedError(
                    "an option of the optimizer cannot be sent to servers", got=f"{name}, a {type(value).__name__}",
                    expected="numbers, words, and lists of them", fix="Leave it out of the parameter groups.",
                ) from error  # fmt: skip
