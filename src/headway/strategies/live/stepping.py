"""Stepping: the optimizer that updates a wrapped model, found at its first step, and what happens around its steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from headway.errors import UnsupportedError, UserError
from headway.torch_private.step_hooks import after_every_step, before_every_step

Owner = TypeVar("Owner")
P = ParamSpec("P")


def weakly(owner: Owner, act: Callable[Concatenate[Owner, P], None]) -> Callable[P, None]:
    """``act`` on ``owner`` for as long as somebody holds it: hooks of optimizers are for ever."""
    found = weakref.ref(owner)

    def acted(*args: P.args, **kwargs: P.kwargs) -> None:
        if (own := found()) is not None:
            act(own, *args, **kwargs)

    return acted


class Stepping:
    """Calls ``before`` and ``after`` around each step of the one optimizer that updates parameters of ``module``.

    ``bound`` is told of that optimizer, once. A step that a ``GradScaler`` leaves out is none.
    Raises UnsupportedError where a second optimizer updates the module: a model between two of them is no step's end.
    """

    def __init__(
        self, module: nn.Module, bound: Callable[[Optimizer], None], before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:  # fmt: skip
        self._module = weakref.ref(module)
        self._bound, self._before, self._after = bound, before, after
        self.optimizer: Optimizer | None = None
        self._handles = [before_every_step(self._before_step), after_every_step(self._after_step)]

    def bind(self, optimizer: Optimizer) -> None:
        """``optimizer`` is the one. Raises UserError where it updates nothing of the model."""
        if not self._updates(optimizer):
            raise UserError(
                "the optimizer updates no parameter of the model", expected="the optimizer of this model",
                fix="Construct it over model.parameters(), after the model is moved.",
            )  # fmt: skip
        self.optimizer = optimizer
        self._bound(optimizer)

    def bind_once(self, optimizer: Optimizer) -> None:
        """The same, where the one is not known yet."""
        if self.optimizer is None:
            self.bind(optimizer)

    def close(self) -> None:
        """Look at steps no more."""
        for handle in self._handles:
            handle.remove()

    def _updates(self, optimizer: Optimizer) -> bool:
        module = self._module()
        if module is None:
            return False
        known = {id(parameter) for parameter in module.parameters()}
        return any(id(p) in known for group in optimizer.param_groups for p in group["params"])

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if optimizer is not self.optimizer:
            if not self._updates(optimizer):
                return
            if self.optimizer is not None:
                raise UnsupportedError(
                    "two optimizers update one model that is averaged", got=type(optimizer).__name__,
                    fix="Give one optimizer several parameter groups.",
                )  # fmt: skip
            self.bind(optimizer)
        self._before()

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if optimizer is self.optimizer:
            with torch.no_grad():
                self._after()
