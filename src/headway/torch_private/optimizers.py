"""Optimizers, loss scaling, data loaders, and hooks and gates around steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, cast

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter


def data_loader_iterator() -> type:
    """The base class of the data loader's iterators, whose ``__next__`` is the wait for input."""
    return _BaseDataLoaderIter


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
    unit_scale, found_inf = torch.ones((), device=device), torch.zeros((), device=device)
    found_inf_by_device = scaler._unscale_grads_(optimizer, unit_scale, found_inf, True)
    return not any(bool(flag) for flag in found_inf_by_device.values())


def steps_in_backward(parameter: torch.Tensor) -> bool:
    """Whether an optimizer was applied to ``parameter`` within backward."""
    return hasattr(parameter, "_in_backward_optimizers")


Step = Callable[..., Any]
Gate = Callable[[Optimizer, Step, tuple[Any, ...], dict[str, Any]], Any]
"""Is given an optimizer, its step, and what that is called with; returns what ``optimizer.step`` returns."""

_gates: list[Gate] = []
_in_gate: set[int] = set()  # ids of optimizers whose step is inside the gate


# Gates around the steps of all optimizers, which decide whether a step is made.
#
# A step hook of torch's can change a step's arguments, and not leave it out. So ``step`` of each optimizer class is
# replaced, for ever, by one that asks the gate.


def gate_steps(gate: Gate) -> None:
    """Have every ``optimizer.step(...)`` of this process go through ``gate`` from now on; there is one.

    Bound steps that somebody holds already, such as schedulers of learning rates, do not.
    """
    if _gates:
        assert _gates == [gate], "two gates"
        return
    _gates.append(gate)
    stock = Optimizer._patch_step_function

    @functools.wraps(stock)
    def patch_step_function(self: Optimizer) -> None:
        stock(self)
        for owner in type(self).__mro__:
            if "step" in vars(owner):
                _gate_class(owner)
                break

    Optimizer._patch_step_function = patch_step_function  # type: ignore[method-assign]
    for subclass in _subclasses(Optimizer):
        if "step" in vars(subclass) and hasattr(subclass.step, "hooked"):  # else no instance has been made
            _gate_class(subclass)


def is_in_gate(optimizer: Optimizer) -> bool:
    """Whether the step that ``optimizer`` is in went through the gate."""
    return id(optimizer) in _in_gate


def _subclasses(of: type) -> Iterator[type[Any]]:
    subclasses: list[type[Any]] = type.__subclasses__(of)
    for subclass in subclasses:
        yield subclass
        yield from _subclasses(subclass)


def _gate_class(owner: type[Any]) -> None:
    step = owner.step
    if hasattr(step, "gated"):
        return

    @functools.wraps(step)
    def gated(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if id(self) in _in_gate:  # a class whose step calls that of another
            return step(self, *args, **kwargs)
        _in_gate.add(id(self))
        try:
            return _gates[0](self, functools.partial(step, self), args, kwargs)
        finally:
            _in_gate.discard(id(self))

    gated.gated = True  # type: ignore[attr-defined]
    # The step without torch's hooks, as it is found where there is no gate.
    gated.__wrapped__ = getattr(step, "__wrapped__", step)
    owner.step = gated


BeforeStep = Callable[[Optimizer, Any, Any], Any]
"""Is told the optimizer and the arguments of its step; returns None, or other arguments as ``(args, kwargs)``."""
AfterStep = Callable[[Optimizer, Any, Any], None]


# Hooks on the steps of all optimizers, which may come and go at any time, in the middle of a step too.
#
# torch goes through a dict of such hooks, and a step fails in which one is added to it or removed. So one hook of each
# kind is given to torch for ever, which calls those that there are.


class StepHook:
    """A hook that is called until it is removed."""

    def __init__(self, hooks: list[StepHook], call: Callable[[Optimizer, Any, Any], Any]) -> None:
        self._hooks, self.call = hooks, call
        hooks.append(self)

    def remove(self) -> None:
        """Have it called no more."""
        if self in self._hooks:
            self._hooks.remove(self)


_before: list[StepHook] = []
_after: list[StepHook] = []


def before_every_step(call: BeforeStep) -> StepHook:
    """Call ``call`` before each step of any optimizer, behind those that are there."""
    _watch()
    return StepHook(_before, call)


def after_every_step(call: AfterStep) -> StepHook:
    """Call ``call`` after each step of any optimizer, behind those that are there."""
    _watch()
    return StepHook(_after, call)


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_step_begins)
    register_optimizer_step_post_hook(_step_ended)


def _step_begins(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    arguments = args, kwargs
    for hook in _before[:]:
        if hook in _before and (changed := hook.call(optimizer, *arguments)) is not None:
            arguments = changed
    return arguments


def _step_ended(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for hook in _after[:]:
        if hook in _after:
            hook.call(optimizer, args, kwargs)
