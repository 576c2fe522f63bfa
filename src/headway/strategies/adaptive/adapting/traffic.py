"""What training stands still for and what its collectives take, summed up as the runtime tells its observers."""

from __future__ import annotations

import threading
from typing import NamedTuple

from headway.strategies.adaptive.tuning.notice import WaitObserver
from headway.strategies.live.channels.observer import Collective


class Sums(NamedTuple):
    """Since the beginning: time that training waited, time in collectives, and their bytes."""

    waited_ns: int = 0
    carried_ns: int = 0
    carried_bytes: int = 0


class Traffic:
    """Sums up what an observer is told. Collectives are told on the threads of channels."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = Sums()
        self._observer: WaitObserver | None = None

    @property
    def sums(self) -> Sums:
        """What it has seen so far."""
        with self._lock:
            return self._sums

    def attach(self) -> None:
        """Observe, unless it does already."""
        if self._observer is None or not self._observer.is_told:
            self._observer = WaitObserver.over(self)

    def detach(self) -> None:
        """Observe no more."""
        if self._observer is not None:
            self._observer.withdraw()

    def carried(self, done: Collective) -> None:
        """Count it."""
        with self._lock:
            waited, carried, size = self._sums
            self._sums = Sums(waited, carried + done.end_ns - done.start_ns, size + done.size_bytes)

    def waited(self, start_ns: int, end_ns: int) -> None:
        """Count it."""
        with self._lock:
            self._sums = self._sums._replace(waited_ns=self._sums.waited_ns + end_ns - start_ns)

    def updated(self, owner: object, bucket: int, start_ns: int, end_ns: int) -> None:
        """Updates are computation."""

    def updated_in_background(self, owner: object, bucket: int, start_ns: int, end_ns: int) -> None:
        """Updates are computation."""
