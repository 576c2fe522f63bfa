"""The time limit of a search: long computations check it, and return their best result when time is up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class TimeLimit:
    """A limit at ``until_s`` of ``time.monotonic``, or none. ``cut_short``: a computation stopped because of it."""

    until_s: float | None = None
    cut_short: bool = False

    @classmethod
    def of(cls, seconds: float | None) -> TimeLimit:
        """A limit ``seconds`` from now, or none."""
        return cls(None if seconds is None else time.monotonic() + seconds)

    def is_over(self) -> bool:
        """Whether time is up; the caller must stop then."""
        over = self.until_s is not None and time.monotonic() >= self.until_s
        self.cut_short |= over
        return over


_current: ContextVar[TimeLimit] = ContextVar("time_limit", default=TimeLimit())  # noqa: B039 - never is over


@contextmanager
def limited(limit: TimeLimit) -> Iterator[None]:
    """Make ``time_is_up`` use ``limit`` within the block."""
    token = _current.set(limit)
    try:
        yield
    finally:
        _current.reset(token)


def time_is_up() -> bool:
    """Whether the search's time is up."""
    return _current.get().is_over()
