"""Snapshots: copies of a worker's state for a peer that joins, taken between two steps, while it goes on training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Snapshots(Generic[T]):
    """Has ``take`` called when nothing changes: by whoever asks while training rests, else by the thread that trains.

    Training rests from ``rest`` to ``resume``: between a step and the next forward, but for ``writing``. So a worker
    that waits for its group gives snapshots, even to the workers that its group waits for. All who ask in one rest are
    given the same one.
    """

    def __init__(self, take: Callable[[], T]) -> None:
        self._take = take
        self._changed = threading.Condition()
        self._resting = False
        self._closed = False
        self._waiting = 0
        self._taken = 0
        self._last: T | None = None
        self._of_rest: T | None = None

    def rest(self) -> None:
        """Nothing changes from now on. Takes a snapshot for those who wait for one."""
        with self._changed:
            self._resting = True
            if self._waiting:
                self._last = self._of_rest = self._take()
                self._taken += 1
                self._changed.notify_all()

    def resume(self) -> None:
        """Things change from now on; returns once no snapshot is being taken."""
        with self._changed:
            self._resting = False
            self._of_rest = None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Things change inside the block, and nowhere before or after it."""
        self.resume()
        try:
            yield
        finally:
            self.rest()

    def close(self) -> None:
        """Give no more snapshots."""
        with self._changed:
            self._closed = True
            self._of_rest = None
            self._changed.notify_all()

    def get(self, deadline: float) -> T:
        """A snapshot. Raises TimeoutError where training does not come to a step's end before ``deadline``."""
        with self._changed:
            if self._resting and not self._closed:
                if self._of_rest is None:
                    self._of_rest = self._take()
                return self._of_rest
            wanted = self._taken + 1
            self._waiting += 1
            try:
                self._changed.wait_for(
                    lambda: self._taken >= wanted or self._closed, max(0.0, deadline - time.monotonic())
                )
                if self._last is None or self._taken < wanted:
                    raise TimeoutError("this worker did not finish a step in time")
                return self._last
            finally:
                self._waiting -= 1
                if not self._waiting:
                    self._last = None
