"""Watches a script's reads of gradients (between backward and step) and of parameters (between step and forward).

A script can read these without calling any function that could be patched. So the class of each plain parameter is
changed in place, while a read is possible, to one that notes accesses; at other times this costs nothing. The accesses
that count are those at which the decoupled runtime (``deferred``) would have to bring a parameter up to date. Once
code has been compiled, parameters are left alone: changing their class would cause a recompilation.
"""

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
from headway.recording.watch import Watch
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
"""Called at an access, with the parameter and the name of the accessing function ("" if unknown)."""


def class_noting_gradients(note: Note) -> type[nn.Parameter]:
    """A parameter class that calls ``note`` when its gradient is read. Uses of its value cost nothing extra."""

    class NoticedGradient(torch_private.StandsInForParameter):
        """An ``nn.Parameter`` while reads of its gradient are noted. Never constructed."""

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
    """A parameter class that calls ``note`` at every use of its value from Python."""

    class NoticedValue(torch_private.StandsInForParameter):
        """An ``nn.Parameter`` while uses of its value are noted. Never constructed."""

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


OnAccess = Callable[[frozenset[str], int, int], None]
"""Called with the names of the accessed parameters, and the times of the first and last access (ns)."""

_CLEARING = "zero_grad"  # of optimizers and modules: it reads the gradients that it clears


class AccessWatch:
    """Collects one thread's accesses while open, and passes them to ``on_access`` at ``flush`` and ``close``.

    Accesses are reads of existing gradients, or uses of parameters' values if ``values`` is set.
    """

    def __init__(self, on_access: OnAccess, *, values: bool = False) -> None:
        self._on_access = on_access
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
        """Start noting accesses to ``parameters``, except those that a strategy's runtime watches itself."""
        self.close()
        if torch_private.has_compiled():
            return
        plain = {name: p for name, p in parameters.items() if type(p) is nn.Parameter and entry_of(p) is None}
        self._name_of = {id(p): name for name, p in plain.items()}
        self._changed = list(plain.values())
        _change(self._changed, nn.Parameter, self._noticing)

    def close(self) -> None:
        """Turn the parameters back into ordinary ones, and report the accesses."""
        _change(self._changed, self._noticing, nn.Parameter)
        self._changed = []
        self.flush()

    def discard(self) -> None:
        """Close without reporting."""
        self._names.clear()
        self.close()

    def flush(self) -> None:
        """Report the accesses so far; later ones are reported separately."""
        if self._names:
            names = frozenset(self._names)
            self._names.clear()
            self._on_access(names, self._first_ns, self._last_ns)

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


class ReadWatch(Watch):
    """Reports reads of one model's gradients and parameters, by the thread that created it, to ``put``."""

    def __init__(self, now: Now, put: Callable[[Event], None]) -> None:
        self._now = now
        self._put = put
        self._thread = threading.get_ident()
        self._parameters: dict[str, nn.Parameter] = {}
        self._is_watching = True
        self._gradient_access = AccessWatch(self._gradients_accessed)
        self._value_access = AccessWatch(self._values_accessed, values=True)

    def attach(self) -> None:
        """Begin to watch."""
        watch_reads(guarded(self._read))

    def detach(self) -> None:
        """Stop."""
        watch_reads(None)
        self._gradient_access.discard()
        self._value_access.discard()

    def model_is(self, root: nn.Module) -> None:
        """Watch reads of the model ``root`` from now on."""
        self._parameters = {name: p for name, p in root.named_parameters() if p.requires_grad}

    def forget(self) -> None:
        """Drop the references to the model's parameters."""
        self._parameters = {}

    def backward_ended(self) -> None:
        """A backward ended: the script may read gradients from now on."""
        now = self._now
        watched = self._is_watching and now.recording and not now.phase
        if watched and threading.get_ident() == self._thread:
            self._gradient_access.open(self._parameters)

    def stepped(self) -> None:
        """The optimizer has stepped: the script may read parameters from now on."""
        if self._is_watching and threading.get_ident() == self._thread:
            self._value_access.open(self._parameters)

    def update_begins(self) -> None:
        """Stop watching accesses until the update has ended; a closure may have run a backward in this step."""
        self.script_reads_end()

    def script_reads_end(self) -> None:
        """A pass or an update begins: what reads gradients and parameters now is not the script."""
        self._gradient_access.close()
        self._value_access.close()

    def leave_parameters(self) -> None:
        """Stop watching accesses for good: code is about to be compiled, and needs ordinary parameters."""
        self._is_watching = False
        self.script_reads_end()

    def _gradients_accessed(self, names: frozenset[str], first_ns: int, last_ns: int) -> None:
        self._put_read(Read.LOOK, names, self._with_gradients(), first_ns, last_ns)

    def _values_accessed(self, names: frozenset[str], first_ns: int, last_ns: int) -> None:
        self._put_read(Read.VALUES, names, self._parameters, first_ns, last_ns)

    def _read(
        self, what_for: str, tensors: Sequence[torch.Tensor], start_ns: int, end_ns: int, sharded: bool
    ) -> None:
        now = self._now
        if not now.recording or now.phase or threading.get_ident() != self._thread:
            return
        names = self._read_of(tensors)
        if names:
            self._gradient_access.flush()  # so that reads before and after it are separate
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
        """Report a read of ``names``. They are listed only if they are not all of ``among``."""

        def put(kind: str, name: str, duration_ns: int, algorithm: str = "") -> None:
            step = self._now.step
            self._put(Event(kind, name, Stream.COMPUTE, step, start_ns, duration_ns, algorithm=algorithm))

        put(Kind.READ, what_for, end_ns - start_ns, algorithm)
        if any(name not in names for name in among):
            for name in names:
                put(Kind.GRADIENT_READ, name, 0)

    def _read_of(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        """The names of parameters that are among ``tensors``, or whose gradients are."""
        ids = {id(tensor) for tensor in tensors}
        return frozenset(
            name for name, p in self._with_gradients().items() if id(p) in ids or id(gradient_of(p)) in ids
        )

    def _with_gradients(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._parameters.items() if gradient_of(p) is not None}
