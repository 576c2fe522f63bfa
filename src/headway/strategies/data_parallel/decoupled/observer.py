"""What the decoupled runtime tells whoever watches it, such as the recorder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Collective:
    """One finished ``reduce_scatter`` or ``all_gather`` of a whole bucket of ``size_bytes``.

    ``sequence`` counts the collectives of one wrapped model, the same on all ranks.
    """

    name: str
    bucket: int
    size_bytes: int
    algorithm: str
    enqueue_ns: int
    start_ns: int
    end_ns: int
    sequence: int


class Observer(Protocol):
    """Told of finished work, as it finishes. All times are ``time.monotonic_ns()`` of this process.

    ``collective`` is called on the communication thread, ``wait`` and ``update`` on the thread that trains. What an
    observer raises is not caught, so it should not raise.
    """

    def collective(self, done: Collective) -> None:
        """A collective was done."""

    def wait(self, name: str, bucket: int, start_ns: int, end_ns: int) -> None:
        """Training stood still until that collective of that bucket was done."""

    def update(self, bucket: int, start_ns: int, end_ns: int) -> None:
        """The optimizer's deferred update of a bucket was applied."""


class NullObserver:
    """Does nothing."""

    def collective(self, done: Collective) -> None:
        """Ignore."""

    def wait(self, name: str, bucket: int, start_ns: int, end_ns: int) -> None:
        """Ignore."""

    def update(self, bucket: int, start_ns: int, end_ns: int) -> None:
        """Ignore."""


_observer: Observer = NullObserver()


def set_observer(new: Observer | None) -> None:
    """Send what happens from now on to ``new``; None stops it."""
    global _observer  # noqa: PLW0603 - one observer a process
    _observer = NullObserver() if new is None else new


def observer() -> Observer:
    """The observer of this process."""
    return _observer
