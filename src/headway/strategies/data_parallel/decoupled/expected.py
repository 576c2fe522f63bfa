"""Which backwards are reduced: those that a synchronised forward of the wrapped model has led to expect.

As under stock DDP a forward says so, not the backward: the next one is reduced, whatever it goes through. So is a later
one that reaches what such a forward returned. Any other, of the bare module on one rank perhaps, stays local.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from headway import torch_private


class _Graph:
    """Stands for one forward; kept alive by the hooks on what it returned."""


class Expected:
    """The backwards of one wrapped model that are to be reduced. True where the next one is."""

    def __init__(self) -> None:
        self._forward = False  # there has been a synchronised forward since the last reduced backward
        self._reached: weakref.WeakSet[_Graph] = weakref.WeakSet()

    def __bool__(self) -> bool:
        return self._forward or len(self._reached) > 0

    def forward(self, output: Any, begins: Callable[[], None]) -> None:
        """A synchronised forward returns ``output``. ``begins`` is called when a backward reaches that."""
        self._forward = True
        reached = _Reached(self, _Graph(), begins)
        for tensor in torch_private.tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(reached)

    def reached(self, graph: _Graph) -> None:
        """A backward has come to what a forward returned, perhaps once more."""
        self._reached.add(graph)

    def backward_ended(self) -> None:
        """A backward was reduced."""
        self._forward = False
        self._reached.clear()


class _Reached:
    """A hook on one output. It need not be saved with it."""

    __torch_unserializable__ = True

    def __init__(self, expected: Expected, graph: _Graph, begins: Callable[[], None]) -> None:
        self._expected = weakref.ref(expected)
        self._graph = graph
        self._begins = begins

    def __call__(self, _gradient: Any) -> None:
        expected = self._expected()
        if expected is not None:
            expected.reached(self._graph)
            self._begins()
