"""Reads of gradients between backward and step, and of parameters after it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from headway import torch_private
from headway.recording.patching import Now, guarded
from headway.strategies.decoupled.deferred import (
    ABOUT_NEITHER,
    GRADIENT_ACCESS,
    entry_of,
    gradient_of,
    ordinary_copy,
    set_gradient,
    tensors_in,
)
from headway.strategies.live.reads import inside_a_read, watch_reads
from headway.trace.events import SHARDED, Event, Kind, Read, Stream

Note = Callable[[nn.Parameter, str], None]
"""Told of a look: the parameter, and the name of the function that looked, where that is known."""


# Classes that parameters are given in place while somebody wants to know who looks at their gradients or values.
#
# As in the decoupled runtime (``deferred``): what makes that bring a parameter up to date counts as a look here. None of
# them is ever constructed.


def class_noting_gradients(note: Note) -> type[nn.Parameter]:
    """The class of parameters that tell ``note`` who reads their gradient; values are used at torch's own speed."""

    class NoticedGradient(torch_private.StandsInForParameter):
        """An ``nn.Parameter`` while looks at its gradient are noted."""

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


def class_noting_values(note: Note) -> type[nn.Parameter]:
    """The class of parameters that tell ``note`` of every use of their value from Python."""

    class NoticedValue(torch_private.StandsInForParameter):
        """An ``nn.Parameter`` while looks at its value are noted."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func not in GRADIENT_ACCESS and func not in ABOUT_NEITHER:
                for parameter in tensors_in((args, kwargs), cls):
                    note(parameter, "")
            with torch_private.without_subclass_dispatch():
                return func(*args, **kwargs)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            """Copy the value into an ordinary parameter."""
            note(self, "")
            with torch_private.without_subclass_dispatch():
                return ordinary_copy(self, memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Pickle an ordinary parameter."""
            note(self, "")
            with torch_private.without_subclass_dispatch():
                return nn.Parameter.__reduce_ex__(self, protocol)

        def __repr__(self) -> Any:  # type: ignore[override]
            """Show an ordinary parameter."""
            note(self, "")
            with torch_private.without_subclass_dispatch():
                return repr(nn.Parameter(self, self.requires_grad))

    return NoticedValue


Looked = Callable[[frozenset[str], int, int], None]
"""Told of looks: the names of the parameters looked at, when the first look was and when the last (ns)."""

_CLEARING = "zero_grad"  # of optimizers and modules, which look at what they clear


# A script's own reads of gradients and parameters, which call no function that could be replaced.
#
# ``.grad`` is watched between backward and step, parameters between a step and the next forward. For that time the class
# of each plain parameter is changed in place, to one that records being read (``noticing``); at other times it costs
# nothing. Where code has been compiled, parameters are left alone: changing their class would cause a recompilation.


class AccessWatch:
    """Tells ``looked`` of one thread's looks while it is open, at a ``flush`` and when it closes.

    They are looks at gradients that are there, or else at ``values``.
    """

    def __init__(self, looked: Looked, *, values: bool = False) -> None:
        self._looked = looked
        self._values = values
        self._noticing = (
            class_noting_values(guarded(self._note))
            if values
            else class_noting_gradients(guarded(self._note))
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
        plain = {name: p for name, p in parameters.items() if type(p) is nn.Parameter and entry_of(p) is None}
        self._name_of = {id(p): name for name, p in plain.items()}
        self._changed = list(plain.values())
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


class ReadWatch:
    """Reports reads of one model's gradients and parameters, on the thread that made it, to ``put`` while attached."""

    def __init__(self, now: Now, put: Callable[[Event], None]) -> None:
        self._now = now
        self._put = put
        self._thread = threading.get_ident()
        self._parameters: dict[str, nn.Parameter] = {}
        self._watches_looks = True
        self._looks = AccessWatch(self._looked)
        self._value_looks = AccessWatch(self._looked_at_values, values=True)

    def attach(self) -> None:
        """Begin to watch."""
        watch_reads(guarded(self._read))

    def detach(self) -> None:
        """Stop."""
        watch_reads(None)
        self._looks.discard()
        self._value_looks.discard()

    def model_is(self, root: nn.Module) -> None:
        """Watch reads of this model."""
        self._parameters = {name: p for name, p in root.named_parameters() if p.requires_grad}

    def forget(self) -> None:
        """Let go of the model."""
        self._parameters = {}

    def backward_ended(self) -> None:
        """The script may read gradients from here on."""
        now = self._now
        watched = self._watches_looks and now.recording and not now.phase
        if watched and threading.get_ident() == self._thread:
            self._looks.open(self._parameters)

    def stepped(self) -> None:
        """The optimizer has stepped: the script may read parameters from here on."""
        if self._watches_looks and threading.get_ident() == self._thread:
            self._value_looks.open(self._parameters)

    def looking_ends(self) -> None:
        """A pass or an update begins."""
        self._looks.close()
        self._value_looks.close()

    def leave_parameters(self) -> None:
        """Code is about to be compiled, which must find ordinary parameters: from here on reads are not watched."""
        self._watches_looks = False
        self.looking_ends()

    def _looked(self, names: frozenset[str], first_ns: int, last_ns: int) -> None:
        self._put_read(Read.LOOK, names, self._with_gradients(), first_ns, last_ns)

    def _looked_at_values(self, names: frozenset[str], first_ns: int, last_ns: int) -> None:
        self._put_read(Read.VALUES, names, self._parameters, first_ns, last_ns)

    def _read(
        self, what_for: str, tensors: Sequence[torch.Tensor], start_ns: int, end_ns: int, sharded: bool
    ) -> None:
        now = self._now
        if not now.recording or now.phase or threading.get_ident() != self._thread:
            return
        names = self._read_of(tensors)
        if names:
            self._looks.flush()  # so that reads before and after it are separate
            algorithm = SHARDED if sharded else ""
            self._put_read(what_for, names, self._with_gradients(), start_ns, end_ns, algorithm)

    def _put_read(
        self,
        what_for: str,
        names: Collection[str],
        among: Iterable[str],
        start_ns: int,
        end_ns: int,
        algorithm: str = "",
    ) -> None:
        """Put a read of ``names``, which are said only where they are not all ``among`` which it could be."""

        def put(kind: str, name: str, duration_ns: int, algorithm: str = "") -> None:
            step = self._now.step
            self._put(Event(kind, name, Stream.COMPUTE, step, start_ns, duration_ns, algorithm=algorithm))

        put(Kind.READ, what_for, end_ns - start_ns, algorithm)
        if any(name not in names for name in among):
            for name in names:
                put(Kind.GRADIENT_READ, name, 0)

    def _read_of(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        """The parameters among ``tensors``, or whose gradients are."""
        ids = {id(tensor) for tensor in tensors}
        return frozenset(
            name for name, p in self._with_gradients().items() if id(p) in ids or id(gradient_of(p)) in ids
        )

    def _with_gradients(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._parameters.items() if gradient_of(p) is not None}
