"""Reads of gradients between backward and step, and of parameters after it: what for, when, and of which parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import nn

from headway.recording.layer import guarded
from headway.recording.looks import LookWatch
from headway.recording.now import Now
from headway.strategies.decoupled.deferred import gradient_of
from headway.strategies.live.reads import watch_reads
from headway.trace.events import SHARDED, Event, Kind, Read, Stream


class ReadWatch:
    """Reports reads of one model's gradients and parameters, on the thread that made it, to ``put`` while attached."""

    def __init__(self, now: Now, put: Callable[[Event], None]) -> None:
        self._now = now
        self._put = put
        self._thread = threading.get_ident()
        self._parameters: dict[str, nn.Parameter] = {}
        self._watches_looks = True
        self._looks = LookWatch(self._looked)
        self._value_looks = LookWatch(self._looked_at_values, values=True)

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
        given = {id(tensor) for tensor in tensors}
        return frozenset(
            name
            for name, p in self._with_gradients().items()
            if id(p) in given or id(gradient_of(p)) in given
        )

    def _with_gradients(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._parameters.items() if gradient_of(p) is not None}
