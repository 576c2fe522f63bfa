"""Hooks on the steps of all optimizers, which may come and go at any time, in the middle of a step too.

torch goes through a dict of such hooks, and a step fails in which one is added to it or removed. So one hook of each
kind is given to torch for ever, which calls those that there are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

BeforeStep = Callable[[Optimizer, Any, Any], Any]
"""Is told the optimizer and the arguments of its step; returns None, or other arguments as ``(args, kwargs)``."""
AfterStep = Callable[[Optimizer, Any, Any], None]


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
    given = args, kwargs
    for hook in _before[:]:
        if hook in _before and (changed := hook.call(optimizer, *given)) is not None:
            given = changed
    return given


def _step_ended(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for hook in _after[:]:
        if hook in _after:
            hook.call(optimizer, args, kwargs)
