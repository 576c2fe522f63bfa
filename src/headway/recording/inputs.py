"""Waits for input: for batches of data loaders, and for workers to start and to end where a loop does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from headway import torch_private
from headway.recording.layer import lay_over

LEAST_LOOP_NS = 200_000  # of a loop's beginning and end, which without workers take next to no time

PutInput = Callable[[int, int], None]


class InputWatch:
    """Tells ``put`` (start, end) of each wait, while attached and ``is_recording``."""

    def __init__(self, put: PutInput, is_recording: Callable[[], bool]) -> None:
        self._put, self._is_recording = put, is_recording
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Begin to watch."""
        assert not self._undo
        self._time(torch_private.data_loader_iterator(), "__next__")
        self._time(DataLoader, "__iter__")

    def detach(self) -> None:
        """Leave no trace."""
        while self._undo:
            self._undo.pop()()

    def _time(self, owner: type, name: str) -> None:
        def timed(original: Callable[[Any], Any], waiting: Any) -> Any:
            if not self._is_recording():
                return original(waiting)
            start_ns = time.monotonic_ns()
            is_batch = False
            try:
                result = original(waiting)
                is_batch = not isinstance(waiting, DataLoader)
            finally:
                end_ns = time.monotonic_ns()
                if is_batch or end_ns - start_ns >= LEAST_LOOP_NS:
                    self._put(start_ns, end_ns)
            return result

        self._undo.append(lay_over(owner, name, timed))
