"""GradScaler where every rank has to make the same steps, and gradients are its own: refused."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from headway import torch_private
from headway.errors import UnsupportedError

_trained: weakref.WeakKeyDictionary[nn.Module, tuple[str, str]] = weakref.WeakKeyDictionary()


def refuse_gradient_scalers_of(
    trained: nn.Module, called: str, fix: str = "Train in bfloat16 without a scaler, or use ddp."
) -> None:
    """Have a ``GradScaler`` that unscales gradients of ``trained`` raise UnsupportedError from now on.

    It leaves out steps where this rank's gradients overflow, and ranks would no longer make the same number of steps.
    ``called`` is what they train under. Where it has an ``is_closed`` it holds until that is true.
    """
    _trained[trained] = called, fix
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
    for trained, (called, fix) in _trained.items():
        if getattr(trained, "is_closed", False):
            continue
        if any(id(parameter) in updated for parameter in trained.parameters()):
            raise UnsupportedError(
                f"a GradScaler under {called} would leave out steps on single ranks",
                got="GradScaler",
                fix=fix,
            )
    return stock(optimizer, inverse_scale, found_inf, allow_fp16)
