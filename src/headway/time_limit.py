"""Until when plans may be looked for: what takes long asks, and returns the best it has when time is up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class TimeLimit:
    """Time is up ``until_s`` on the clock of ``time.monotonic``, or never. ``cut_short``: somebody stopped for it."""

    until_s: float | None = None
    cut_short: bool = False

    @classmethod
    def of(cls, seconds: float | None) -> TimeLimit:
        """So many seconds from now, or never."""
        return cls(None if seconds is None else time.monotonic() + seconds)

    def is_over(self) -> bool:
        """Whether time is up; whoever asks stops then."""
        over = self.until_s is not None and time.monotonic() >= self.until_s
        self.cut_short |= over
        return over


_current: ContextVar[TimeLimit] = ContextVar("time_limit", default=TimeLimit())  # noqa: B039 - never is over


@contextmanager
def limited(limit: TimeLimit) -> Iterator[None]:
    """Have ``time_is_up`` ask ``limit`` inside of the block."""
    token = _current.set(limit)
    try:
        yield
    finally:
        _current.reset(token)


def time_is_up() -> bool:
    """Whether the time that plans may be looked for is over."""
    return _current.get().is_over()
