"""Which backwards are reduced: those that a synchronised forward of the wrapped model has led to expect.

As under stock DDP a forward says so, not the backward. A backward of the bare module, on one rank perhaps, stays local.
Each forward's graph counts by itself, and no longer than until its backward, or until it is given up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from headway import torch_private


class _Graph:
    """Stands for one forward; kept alive by the hooks on what it returned."""


class Expected:
    """The graphs of one wrapped model whose backward is to be reduced. True where there is one."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[_Graph] = weakref.WeakSet()
        self._reached: weakref.WeakSet[_Graph] = weakref.WeakSet()
        self._unseen = False  # a forward returned something that torch cannot take apart

    def __bool__(self) -> bool:
        return self._unseen or len(self._graphs) > 0

    def forward(self, output: Any, begins: Callable[[], None]) -> None:
        """A synchronised forward returns ``output``. ``begins`` is called when a backward reaches that."""
        graph = _Graph()
        tensors = [t for t in torch_private.tensors_in(output) if t.grad_fn is not None]
        for tensor in tensors:
            tensor.register_hook(_Reached(self, graph, begins))
        if tensors:
            self._graphs.add(graph)
        else:
            self._unseen = True

    def reached(self, graph: _Graph) -> None:
        """A backward has come to what a forward returned, perhaps once more."""
        self._graphs.add(graph)
        self._reached.add(graph)

    def backward_ended(self) -> None:
        """A backward was reduced: the graphs that it reached are done with."""
        for graph in list(self._reached):
            self._graphs.discard(graph)
        self._reached.clear()
        self._unseen = False


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
