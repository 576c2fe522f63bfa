"""The engine's loops compiled, where that pays and a compiler is there."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

from headway.simulation import kernel

WORTH_OPERATIONS = 20_000  # fewer are played before a compiler has been loaded
_LOOPS = (
    kernel.push, kernel.drop_first, kernel.grow, kernel.precedes, kernel.settle, kernel.leave_time_ns,
    kernel.proportional, kernel.reach, kernel.grant,
    kernel.set_rate, kernel.reallocate,
    kernel.save, kernel.hold, kernel.spend, kernel.overtake, kernel.start_flow, kernel.end_first_flow,
    kernel.run, kernel.are_asked,
    kernel.simulate,
)  # fmt: skip


def simulate_for(operations: int) -> Callable[..., kernel.PlayState]:
    """``kernel.simulate`` for a graph of so many operations: compiled, unless it is small or numba is missing."""
    if _compiled.cache_info().currsize == 0 and operations < WORTH_OPERATIONS:
        return kernel.simulate
    return _compiled()


@cache
def _compiled() -> Callable[..., kernel.PlayState]:
    if importlib.util.find_spec("numba") is None:
        return kernel.simulate
    from numba import njit

    # Loops call each other by their names in a module, which stay Python's: compiled ones get names of their own.
    names: dict[str, Any] = dict(vars(kernel))
    for loop in _LOOPS:
        assert isinstance(loop, FunctionType)
        own = FunctionType(loop.__code__, names, loop.__name__)
        own.__module__, own.__qualname__ = loop.__module__, loop.__qualname__
        try:
            names[loop.__name__] = njit(cache=True)(own)
        except RuntimeError:  # nowhere to keep it
            names[loop.__name__] = njit(own)
    simulate: Callable[..., kernel.PlayState] = names["simulate"]
    return simulate
