"""Sets of time: unions of half-open spans in integer nanoseconds, so that sums are exact."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from headway.arrays import Ints

Spans = npt.NDArray[np.int64]
"""Shape (n, 2): starts and ends, in order, not empty, and with a gap between neighbours."""

Time = TypeVar("Time", int, float)

EMPTY: Spans = np.zeros((0, 2), dtype=np.int64)


def union(starts: Ints, ends: Ints) -> Spans:
    """The time that at least one of the spans covers. Empty spans are ignored."""
    some = ends > starts
    starts, ends = starts[some], ends[some]
    if not len(starts):
        return EMPTY
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.flatnonzero(np.concatenate([[True], starts[1:] > reach[:-1]]))
    last = np.concatenate([first[1:] - 1, [len(starts) - 1]])
    return np.column_stack([starts[first], reach[last]])


def join(*sets: Spans) -> Spans:
    """The time in any of the sets."""
    spans = np.concatenate(sets) if sets else EMPTY
    return union(spans[:, 0], spans[:, 1])


def intersect(a: Spans, b: Spans) -> Spans:
    """The time in both sets."""
    lefts, rights, in_a, in_b = _cut(a, b)
    both = in_a & in_b
    return union(lefts[both], rights[both])


def subtract(a: Spans, b: Spans) -> Spans:
    """The time in ``a`` and not in ``b``."""
    lefts, rights, in_a, in_b = _cut(a, b)
    only = in_a & ~in_b
    return union(lefts[only], rights[only])


def inside(spans: Spans, times: Ints) -> npt.NDArray[np.bool_]:
    """Whether each time lies in the set (its starts included, its ends not)."""
    odd: npt.NDArray[np.bool_] = np.searchsorted(spans.ravel(), times, side="right") % 2 == 1
    return odd


def length_ns(spans: Spans) -> int:
    """How much time the set covers."""
    return int((spans[:, 1] - spans[:, 0]).sum())


def length_within(spans: Spans, starts: Ints, ends: Ints) -> Ints:
    """How much of the set lies in each window. Windows may overlap; none ends before it starts."""
    within: Ints = _length_before(spans, ends) - _length_before(spans, starts)
    return within


def _length_before(spans: Spans, times: Ints) -> Ints:
    if not len(spans):
        return np.zeros(len(times), dtype=np.int64)
    total = np.concatenate([[0], np.cumsum(spans[:, 1] - spans[:, 0])])
    begun = np.searchsorted(spans[:, 0], times, side="right")
    beyond = np.maximum(spans[np.maximum(begun - 1, 0), 1] - times, 0)
    before: Ints = total[begun] - np.where(begun > 0, beyond, 0)
    return before


def _cut(a: Spans, b: Spans) -> tuple[Ints, Ints, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Cut time at every border of either set; for each piece: start, end, in ``a``, in ``b``."""
    cuts = np.unique(np.concatenate([a.ravel(), b.ravel()]))
    lefts, rights = cuts[:-1], cuts[1:]
    return lefts, rights, inside(a, lefts), inside(b, lefts)


def merged(spans: Iterable[tuple[Time, Time]]) -> Iterator[tuple[Time, Time]]:
    """The time that at least one of the spans covers, in order. Empty spans are ignored."""
    open_: tuple[Time, Time] | None = None
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if open_ is None:
            open_ = start, end
        elif start <= open_[1]:
            open_ = open_[0], max(open_[1], end)
        else:
            yield open_
            open_ = start, end
    if open_ is not None:
        yield open_


class Intervals:
    """A set of time with prefix sums, for repeated queries of the share that it covers."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        spans_in_order = list(merged(spans))
        self._starts = [start for start, _ in spans_in_order]
        self._ends = [end for _, end in spans_in_order]
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
