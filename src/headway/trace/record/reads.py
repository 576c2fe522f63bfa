"""Reads of gradients between backward and step, as they pass: what for, when, and of which parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from headway.strategies.data_parallel.decoupled.deferred import gradient_of
from headway.strategies.data_parallel.reads import watch_reads
from headway.trace.events import SHARDED, Event, Kind, Stream
from headway.trace.record.now import Now


class ReadWatch:
    """Tells ``put`` of reads of one model's gradients on the thread that made it, while attached."""

    def __init__(self, now: Now, put: Callable[[Event], None]) -> None:
        self._now = now
        self._put = put
        self._thread = threading.get_ident()
        self._parameters: dict[str, nn.Parameter] = {}

    def attach(self) -> None:
        """Begin to watch."""
        watch_reads(self._read)

    def detach(self) -> None:
        """Stop."""
        watch_reads(None)

    def model_is(self, root: nn.Module) -> None:
        """Watch reads of this model's gradients."""
        self._parameters = {name: p for name, p in root.named_parameters() if p.requires_grad}

    def forget(self) -> None:
        """Let go of the model."""
        self._parameters = {}

    def _read(
        self, what_for: str, tensors: Sequence[torch.Tensor], start_ns: int, end_ns: int, sharded: bool
    ) -> None:
        now = self._now
        if not now.recording or now.phase or threading.get_ident() != self._thread:
            return
        names = self._read_of(tensors)
        if not names:
            return
        algorithm = SHARDED if sharded else ""
        self._put(
            Event(
                Kind.READ,
                what_for,
                Stream.COMPUTE,
                now.step,
                start_ns,
                end_ns - start_ns,
                algorithm=algorithm,
            )
        )
        if len(names) < len(self._with_gradients()):
            for name in names:
                self._put(Event(Kind.GRADIENT_READ, name, Stream.COMPUTE, now.step, start_ns, 0))

    def _read_of(self, tensors: Iterable[torch.Tensor]) -> list[str]:
        """The parameters among ``tensors``, or whose gradients are."""
        given = {id(tensor) for tensor in tensors}
        return [name for name, p in self._with_gradients() if id(p) in given or id(gradient_of(p)) in given]

    def _with_gradients(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self._parameters.items() if gradient_of(p) is not None]
