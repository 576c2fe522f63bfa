"""A script's own looks at ``.grad`` between backward and step, which pass no function that could be replaced.

Between the two the class of each plain parameter is changed in place, to one whose ``.grad`` notes being read, as the
decoupled runtime does (``deferred``). Values are used at torch's own speed, and outside of that time nothing costs
anything. Where code has been compiled parameters are left alone: they would have it compiled anew.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from headway import torch_private
from headway.strategies.data_parallel.decoupled.deferred import (
    entry_of,
    gradient_of,
    ordinary_copy,
    set_gradient,
)
from headway.strategies.data_parallel.reads import inside_a_read

Looked = Callable[[frozenset[str], int, int], None]
"""Told of looks: the names of the parameters that had gradients, when the first look was and when the last (ns)."""

_CLEARING = "zero_grad"  # of optimizers and modules, which look at what they clear


class LookWatch:
    """Tells ``looked`` of one thread's looks at gradients while it is open, at a ``flush`` and when it closes."""

    def __init__(self, looked: Looked) -> None:
        self._looked = looked
        self._noticing = _noticing(self._note)
        self._thread = threading.get_ident()
        self._changed: list[nn.Parameter] = []
        self._name_of: dict[int, str] = {}
        self._names: set[str] = set()
        self._first_ns = self._last_ns = 0

    def open(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Note looks at the gradients of ``parameters``, but of those that a strategy's runtime watches itself."""
        self.close()
        if torch_private.has_compiled():
            return
        own = {name: p for name, p in parameters.items() if type(p) is nn.Parameter and entry_of(p) is None}
        self._name_of = {id(p): name for name, p in own.items()}
        self._changed = list(own.values())
        _change(self._changed, nn.Parameter, self._noticing)

    def close(self) -> None:
        """Make the parameters ordinary ones again."""
        _change(self._changed, self._noticing, nn.Parameter)
        self._changed = []
        self.flush()

    def discard(self) -> None:
        """Close, and tell nobody."""
        self._names.clear()
        self.close()

    def flush(self) -> None:
        """Tell of the looks so far; later ones are others."""
        if self._names:
            names = frozenset(self._names)
            self._names.clear()
            self._looked(names, self._first_ns, self._last_ns)

    def _note(self, parameter: nn.Parameter, caller: str) -> None:
        if threading.get_ident() != self._thread or inside_a_read():
            return
        if caller == _CLEARING:
            self.close()
            return
        if gradient_of(parameter) is not None:
            self._last_ns = time.monotonic_ns()
            if not self._names:
                self._first_ns = self._last_ns
            self._names.add(self._name_of[id(parameter)])


def _change(
    parameters: Iterable[nn.Parameter], before: type[nn.Parameter], after: type[nn.Parameter]
) -> None:
    for parameter in parameters:
        if type(parameter) is before:
            parameter.__class__ = after


def _noticing(note: Callable[[nn.Parameter, str], None]) -> type[nn.Parameter]:
    """The class of parameters that tell ``note`` who reads their gradient: the name of the calling function."""

    class NoticedGradient(nn.Parameter):
        """An ``nn.Parameter`` while looks at its gradient are noted. Never constructed."""

        @property
        def grad(self) -> torch.Tensor | None:
            """The gradient."""
            note(self, sys._getframe(1).f_code.co_name)
            return gradient_of(self)

        @grad.setter
        def grad(self, value: torch.Tensor | None) -> None:
            set_gradient(self, value)

        @grad.deleter
        def grad(self) -> None:
            set_gradient(self, None)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            """Copy the value into an ordinary parameter."""
            return ordinary_copy(self, memo)

    return NoticedGradient
