"""What holds the main thread up besides its passes: waits for works, garbage collections, checkpoints."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from headway.recording.layer import guarded, lay_over
from headway.trace.events import WORK, Kind

LEAST_NS = 200_000  # shorter ones are not worth a row
COLLECTION, CHECKPOINT = "garbage collection", "torch.save"

PutPause = Callable[[str, str, int, int], None]


class PauseWatch:
    """Tells ``put`` (kind, name, start, end) of waits and pauses of the thread that made it, while attached."""

    def __init__(self, put: PutPause) -> None:
        self._put = put
        self._thread = threading.get_ident()
        self._collection_ns = 0
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Begin to watch."""
        assert not self._undo
        collecting = guarded(self._collecting)
        gc.callbacks.append(collecting)
        self._undo.append(lambda: gc.callbacks.remove(collecting))
        self._time(dist.Work, "wait", Kind.WAIT, WORK)
        self._time(torch, "save", Kind.PAUSE, CHECKPOINT)

    def detach(self) -> None:
        """Leave no trace."""
        while self._undo:
            self._undo.pop()()

    def _time(self, owner: Any, name: str, kind: str, what: str) -> None:
        def timed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            start_ns = time.monotonic_ns()
            try:
                return original(*args, **kwargs)
            finally:
                self._ended(kind, what, start_ns)

        self._undo.append(lay_over(owner, name, timed))

    def _collecting(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._collection_ns = time.monotonic_ns()
        elif self._collection_ns:
            self._ended(Kind.PAUSE, COLLECTION, self._collection_ns)
            self._collection_ns = 0

    def _ended(self, kind: str, name: str, start_ns: int) -> None:
        end_ns = time.monotonic_ns()
        if end_ns - start_ns >= LEAST_NS and threading.get_ident() == self._thread:
            self._put(kind, name, start_ns, end_ns)
