"""Optimizers and loss scaling."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch


def unhooked_step(optimizer_type: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The ``step`` of an optimizer class without the step hooks that torch wraps around it."""
    step: Any = optimizer_type.step
    return cast("Callable[..., Any]", step.__wrapped__ if getattr(step, "hooked", False) else step)


Unscaling = Callable[[torch.optim.Optimizer, torch.Tensor, torch.Tensor, bool], Any]


def around_unscaling(
    around: Callable[[Unscaling, torch.optim.Optimizer, torch.Tensor, torch.Tensor, bool], Any],
) -> None:
    """Have every ``GradScaler`` call ``around`` to unscale, which is given what it did before, and its arguments.

    These are (optimizer, inverse scale, found_inf, allow_fp16), and found_inf by device is returned.
    """
    stock = torch.amp.GradScaler._unscale_grads_

    @functools.wraps(stock)
    def unscale_grads(scaler: Any, *args: Any) -> Any:
        return around(functools.partial(stock, scaler), *args)

    torch.amp.GradScaler._unscale_grads_ = unscale_grads  # type: ignore[method-assign, assignment]


def unscale(gradients: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Multiply ``gradients``, of one dtype; set ``found_inf`` to 1 where an element was not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale)


def gradients_are_finite(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``GradScaler`` would have ``optimizer`` step, where gradients need no unscaling.

    Strategies answer for gradients that are not whole, and agree between ranks.
    """
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), None)
    if device is None:
        return True
    scaler = torch.amp.GradScaler(device.type)
    one, found = torch.ones((), device=device), torch.zeros((), device=device)
    found_by_device = scaler._unscale_grads_(optimizer, one, found, True)
    return not any(bool(each) for each in found_by_device.values())


def steps_in_backward(parameter: torch.Tensor) -> bool:
    """Whether an optimizer was applied to ``parameter`` within backward."""
    return hasattr(parameter, "_in_backward_optimizers")
