"""Intervals of time, merged, and how much of a stretch lies inside them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


class Intervals:
    """Disjoint intervals [start, end) in order, with the time before each summed up."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(spans):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            elif end > start:
                self._starts.append(start)
                self._ends.append(end)
        self._before = [0]
        for start, end in zip(self._starts, self._ends, strict=True):
            self._before.append(self._before[-1] + end - start)

    def share_of(self, start: int, end: int) -> float:
        """The share of [start, end) that lies inside, from 0 to 1."""
        return (self._until(end) - self._until(start)) / (end - start) if end > start else 0.0

    def _until(self, time: int) -> int:
        """How much of the intervals lies before ``time``."""
        index = bisect_right(self._starts, time)
        if index == 0:
            return 0
        return self._before[index - 1] + min(time, self._ends[index - 1]) - self._starts[index - 1]
