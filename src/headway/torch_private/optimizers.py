"""Private names of optimizers, GradScaler and data loaders, and hooks and gates around all optimizer steps."""

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
    """Have every ``GradScaler`` unscale through ``around(stock, optimizer, inverse_scale, found_inf, allow_fp16)``.

    ``stock`` is the original method. ``around`` returns found_inf by device.
    """
    stock = torch.amp.GradScaler._unscale_grads_

    @functools.wraps(stock)
    def unscale_grads(scaler: Any, *args: Any) -> Any:
        return around(functools.partial(stock, scaler), *args)

    torch.amp.GradScaler._unscale_grads_ = unscale_grads  # type: ignore[method-assign, assignment]


def unscale(gradients: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Multiply ``gradients`` (of one dtype) by ``inverse_scale``; set ``found_inf`` to 1 if any element is not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale)


def gradients_are_finite(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all gradients of ``optimizer`` are finite, so that ``GradScaler`` would let it step.

    Goes through ``GradScaler``'s unscaling, which strategies with partial gradients patch to agree between ranks.
    """
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), None)
    if device is None:
        return True
    scaler = torch.amp.GradScaler(device.type)
    unit_scale, found_inf = torch.ones((), device=device), torch.zeros((), device=device)
    found_inf_by_device = scaler._unscale_grads_(optimizer, unit_scale, found_inf, True)
    return not any(bool(flag) for flag in found_inf_by_device.values())


def steps_in_backward(parameter: torch.Tensor) -> bool:
    """Whether an optimizer steps ``parameter`` within backward (``_apply_optimizer_in_backward``)."""
    return hasattr(parameter, "_in_backward_optimizers")


Step = Callable[..., Any]
Gate = Callable[[Optimizer, Step, tuple[Any, ...], dict[str, Any]], Any]
"""Called with an optimizer, its step, and the step's arguments; returns the result of ``optimizer.step``."""

_gates: list[Gate] = []
_in_gate: set[int] = set()  # ids of optimizers whose step is inside the gate


# A step hook of torch can change a step's arguments, but cannot skip the step. So ``step`` of each optimizer class is
# replaced, permanently, by one that calls the gate.


def gate_steps(gate: Gate) -> None:
    """Have every ``optimizer.step(...)`` of this process go through ``gate`` from now on. There can be only one gate.

    Bound ``step`` methods taken earlier, as by learning-rate schedulers, bypass it.
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
    """Whether ``optimizer`` is in a step that went through the gate."""
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
        if id(self) in _in_gate:  # a step that calls the step of its base class
            return step(self, *args, **kwargs)
        _in_gate.add(id(self))
        try:
            return _gates[0](self, functools.partial(step, self), args, kwargs)
        finally:
            _in_gate.discard(id(self))

    gated.gated = True  # type: ignore[attr-defined]
    # The step without torch's hooks, as ``unhooked_step`` expects it.
    gated.__wrapped__ = getattr(step, "__wrapped__", step)
    owner.step = gated


BeforeStep = Callable[[Optimizer, Any, Any], Any]
"""Called with the optimizer and the step's arguments; returns None, or replacements as ``(args, kwargs)``."""
AfterStep = Callable[[Optimizer, Any, Any], None]


# Hooks on the steps of all optimizers may be added and removed at any time, even during a step. torch iterates over a
# dict of such hooks, and fails if it changes meanwhile. So torch permanently gets one hook of each kind: it calls ours.


class StepHook:
    """A hook on optimizer steps, active until it is removed."""

    def __init__(self, hooks: list[StepHook], call: Callable[[Optimizer, Any, Any], Any]) -> None:
        self._hooks, self.call = hooks, call
        hooks.append(self)

    def remove(self) -> None:
        """Deactivate the hook."""
        if self in self._hooks:
            self._hooks.remove(self)


_before: list[StepHook] = []
_after: list[StepHook] = []


def before_every_step(call: BeforeStep) -> StepHook:
    """Call ``call`` before each step of any optimizer, after existing hooks."""
    _watch()
    return StepHook(_before, call)


def after_every_step(call: AfterStep) -> StepHook:
    """Call ``call`` after each step of any optimizer, after existing hooks."""
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
