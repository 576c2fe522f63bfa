"""A script's own reads of gradients and parameters, which call no function that could be replaced.

``.grad`` is watched between backward and step, parameters between a step and the next forward. For that time the class
of each plain parameter is changed in place, to one that records being read (``noticing``); at other times it costs
nothing. Where code has been compiled, parameters are left alone: changing their class would cause a recompilation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from torch import nn

from headway import torch_private
from headway.recording.layer import guarded
from headway.recording.noticing import noticing_gradients, noticing_values
from headway.strategies.decoupled.deferred import entry_of, gradient_of
from headway.strategies.live.reads import inside_a_read

Looked = Callable[[frozenset[str], int, int], None]
"""Told of looks: the names of the parameters looked at, when the first look was and when the last (ns)."""

_CLEARING = "zero_grad"  # of optimizers and modules, which look at what they clear


class LookWatch:
    """Tells ``looked`` of one thread's looks while it is open, at a ``flush`` and when it closes.

    They are looks at gradients that are there, or else at ``values``.
    """

    def __init__(self, looked: Looked, *, values: bool = False) -> None:
        self._looked = looked
        self._values = values
        self._noticing = (
            noticing_values(guarded(self._note)) if values else noticing_gradients(guarded(self._note))
        )
        self._thread = threading.get_ident()
        self._changed: list[nn.Parameter] = []
        self._name_of: dict[int, str] = {}
        self._names: set[str] = set()
        self._first_ns = self._last_ns = 0

    def open(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Note looks at ``parameters``, but at those that a strategy's runtime watches itself."""
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
        name = self._name_of.get(id(parameter))
        if name is None or threading.get_ident() != self._thread or inside_a_read():
            return
        if caller == _CLEARING:
            self.close()
            return
        if self._values or gradient_of(parameter) is not None:
            self._last_ns = time.monotonic_ns()
            if not self._names:
                self._first_ns = self._last_ns
            self._names.add(name)


def _change(
    parameters: Iterable[nn.Parameter], before: type[nn.Parameter], after: type[nn.Parameter]
) -> None:
    for parameter in parameters:
        if type(parameter) is before:
            parameter.__class__ = after
