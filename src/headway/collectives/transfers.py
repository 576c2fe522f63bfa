"""The messages of a collective, for who wants to know of them: which rank sent what to whom, and when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message of this rank. Times are ``time.monotonic_ns()``.

    ``peer`` is the other's rank in the job. A receive is done when its piece has arrived; a send when it was seen to
    have left, which nobody looks for before the rank has done everything else.
    """

    sends: bool
    peer: int
    size_bytes: int
    posted_ns: int
    done_ns: int


class _Wanted(threading.local):
    found: list[Transfer] | None = None


_wanted = _Wanted()


def wanted() -> list[Transfer] | None:
    """Where this thread's messages are to be put, if anybody wants them."""
    return _wanted.found


@contextmanager
def collected() -> Iterator[list[Transfer]]:
    """Collect the messages of what this thread runs inside the block."""
    before = _wanted.found
    found: list[Transfer] = []
    _wanted.found = found
    try:
        yield found
    finally:
        _wanted.found = before
