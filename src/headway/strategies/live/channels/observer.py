"""What channels tell whoever watches them, such as the recorder: decoupled or of parameter servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headway.collectives.transfers import Transfer

THREAD_NAME = "headway-communication"  # of threads whose collectives are told to the observer


@dataclass(frozen=True, slots=True)
class Collective:
    """One finished ``reduce_scatter`` or ``all_gather`` of a whole bucket of ``size_bytes``.

    ``strategy`` is the name of the strategy whose bucket it is.
    ``sequence`` counts the collectives of one wrapped model, the same on all ranks. ``transfers`` are this rank's
    messages, where the collective is one of ours and the observer wants them.
    """

    name: str
    bucket: int
    size_bytes: int
    algorithm: str
    enqueue_ns: int
    start_ns: int
    end_ns: int
    sequence: int
    strategy: str
    transfers: Sequence[Transfer] = ()


class Observer(Protocol):
    """Told of finished work, as it finishes. All times are ``time.monotonic_ns()`` of this process.

    ``collective`` and ``background_update`` are called on communication threads, ``wait`` and ``update`` on the thread
    that trains. What an observer raises is not caught, so it should not raise. ``owner`` tells the buckets of several
    wrapped models apart: it is the engine that they are of.
    """

    @property
    def wants_transfers(self) -> bool:
        """Whether the messages of collectives are to be timed."""

    def collective(self, done: Collective) -> None:
        """A collective was done."""

    def wait(self, name: str, bucket: int, start_ns: int, end_ns: int) -> None:
        """Training stood still until that collective of that bucket was done."""

    def update(self, owner: object, bucket: int, start_ns: int, end_ns: int) -> None:
        """What was due for a bucket was applied to its parameters: the update, or values that ranks had gathered."""

    def background_update(self, owner: object, bucket: int, start_ns: int, end_ns: int) -> None:
        """This rank's share of a bucket was updated, off the training thread."""


class NullObserver:
    """Does nothing."""

    wants_transfers = False

    def collective(self, done: Collective) -> None:
        """Ignore."""

    def wait(self, name: str, bucket: int, start_ns: int, end_ns: int) -> None:
        """Ignore."""

    def update(self, owner: object, bucket: int, start_ns: int, end_ns: int) -> None:
        """Ignore."""

    def background_update(self, owner: object, bucket: int, start_ns: int, end_ns: int) -> None:
        """Ignore."""


_observer: Observer = NullObserver()


def set_observer(new: Observer | None) -> None:
    """Send what happens from now on to ``new``; None stops it."""
    global _observer  # noqa: PLW0603 - one observer a process
    _observer = NullObserver() if new is None else new


def observer() -> Observer:
    """The observer of this process."""
    return _observer
