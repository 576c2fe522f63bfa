"""GradScaler and local SGD: refused, as it would leave out steps on single ranks."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from headway import torch_private
from headway.errors import UnsupportedError

_trained: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def refuse_gradient_scalers_of(wrapped: nn.Module) -> None:
    """Have a ``GradScaler`` that unscales gradients of ``wrapped`` raise UnsupportedError from now on.

    It leaves out steps where this rank's gradients overflow, and ranks would no longer make the same number of steps.
    """
    _trained.add(wrapped)
    _watch_scalers()


@cache
def _watch_scalers() -> None:
    torch_private.around_unscaling(_unscale)


def _unscale(
    stock: torch_private.Unscaling,
    optimizer: Optimizer,
    inverse_scale: torch.Tensor,
    found_inf: torch.Tensor,
    allow_fp16: bool,
) -> Any:
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(id(parameter) in updated for wrapped in _trained for parameter in wrapped.parameters()):
        raise UnsupportedError(
            "a GradScaler under local SGD would leave out steps on single ranks", got="GradScaler",
            fix="Train in bfloat16 without a scaler, or use ddp.",
        )  # fmt: skip
    return stock(optimizer, inverse_scale, found_inf, allow_fp16)
