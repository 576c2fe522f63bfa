"""Which backwards are reduced: those that a synchronised forward of the wrapped model has led to expect.

As in stock DDP, a synchronised forward arms the reduction; the next backward is reduced whatever it traverses. So is a
later one that reaches what such a forward returned. Any other, of the bare module on one rank perhaps, stays local.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from headway import torch_private


class Expected:
    """The backwards of one wrapped model that are to be reduced. True where the next one is.

    ``begins`` is called when a backward reaches what a synchronised forward returned, and ``begins_late`` before it
    where stock DDP would not reduce that backward: another has been reduced since the forward.
    """

    def __init__(self, begins: Callable[[], None], begins_late: Callable[[], None]) -> None:
        self._begins = begins
        self._begins_late = begins_late
        self._forward = False  # there has been a synchronised forward since the last reduced backward
        self._reached: weakref.WeakSet[_Output] = weakref.WeakSet()  # they live as long as their graphs

    def __bool__(self) -> bool:
        return self._forward or len(self._reached) > 0

    def forward(self, output: Any) -> None:
        """A synchronised forward returns ``output``."""
        self._forward = True
        hook = _Output(self)
        for tensor in torch_private.tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(hook)

    def reached(self, output: _Output) -> None:
        """A backward has come to what a forward returned, perhaps once more."""
        if not self:
            self._begins_late()
        self._reached.add(output)
        self._begins()

    def backward_ended(self) -> None:
        """A backward was reduced."""
        self._forward = False
        self._reached.clear()


class _Output:
    """A hook on all that one forward returned. It need not be saved with it."""

    __torch_unserializable__ = True

    def __init__(self, expected: Expected) -> None:
        self._expected = weakref.ref(expected)

    def __call__(self, _gradient: Any) -> None:
        if (expected := self._expected()) is not None:
            expected.reached(self)
