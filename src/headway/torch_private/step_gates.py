"""Gates around the steps of all optimizers, which decide whether a step is made.

A step hook of torch's can change a step's arguments, and not leave it out. So ``step`` of each optimizer class is
replaced, for ever, by one that asks the gate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim.optimizer import Optimizer

Step = Callable[..., Any]
Gate = Callable[[Optimizer, Step, tuple[Any, ...], dict[str, Any]], Any]
"""Is given an optimizer, its step, and what that is called with; returns what ``optimizer.step`` returns."""

_gates: list[Gate] = []
_asked: set[int] = set()  # ids of optimizers whose step asks


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
    for each in _subclasses(Optimizer):
        if "step" in vars(each) and hasattr(each.step, "hooked"):  # else no instance has been made
            _gate_class(each)


def is_asked(optimizer: Optimizer) -> bool:
    """Whether the step that ``optimizer`` is in went through the gate."""
    return id(optimizer) in _asked


def _subclasses(of: type) -> Iterator[type[Any]]:
    known: list[type[Any]] = type.__subclasses__(of)
    for each in known:
        yield each
        yield from _subclasses(each)


def _gate_class(owner: type[Any]) -> None:
    step = owner.step
    if hasattr(step, "gated"):
        return

    @functools.wraps(step)
    def gated(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if id(self) in _asked:  # a class whose step calls that of another
            return step(self, *args, **kwargs)
        _asked.add(id(self))
        try:
            return _gates[0](self, functools.partial(step, self), args, kwargs)
        finally:
            _asked.discard(id(self))

    gated.gated = True  # type: ignore[attr-defined]
    # The step without torch's hooks, as it is found where there is no gate.
    gated.__wrapped__ = getattr(step, "__wrapped__", step)
    owner.step = gated
