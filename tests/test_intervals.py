"""Sets of time, held against counting every nanosecond."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway import intervals

END = 60
spans = st.lists(st.tuples(st.integers(0, END), st.integers(0, END)).map(sorted), max_size=12)


def as_set(rows: list[list[int]]) -> intervals.Spans:
    array = np.array(rows, dtype=np.int64).reshape(-1, 2)
    return intervals.union(array[:, 0], array[:, 1])


def moments(rows: list[list[int]]) -> set[int]:
    return {moment for start, end in rows for moment in range(start, end)}


def counted(found: intervals.Spans) -> set[int]:
    return moments(found.tolist())


@given(spans, spans)
def test_sets_are_what_counting_says(a: list[list[int]], b: list[list[int]]) -> None:
    assert counted(as_set(a)) == moments(a)
    assert counted(intervals.join(as_set(a), as_set(b))) == moments(a) | moments(b)
    assert counted(intervals.intersect(as_set(a), as_set(b))) == moments(a) & moments(b)
    assert counted(intervals.subtract(as_set(a), as_set(b))) == moments(a) - moments(b)
    assert intervals.length_ns(as_set(a)) == len(moments(a))


@given(spans, spans)
def test_windows_are_measured(a: list[list[int]], windows: list[list[int]]) -> None:
    array = np.array(windows, dtype=np.int64).reshape(-1, 2)
    found = intervals.length_within(as_set(a), array[:, 0], array[:, 1])
    assert found.tolist() == [len(moments(a) & set(range(start, end))) for start, end in windows]


@given(spans)
def test_sets_are_in_order_with_gaps(a: list[list[int]]) -> None:
    borders = as_set(a).ravel()
    assert (np.diff(borders) > 0).all()
    assert intervals.inside(as_set(a), np.arange(END)).tolist() == [t in moments(a) for t in range(END)]


times = st.integers(0, 100)


@given(rows=st.lists(st.tuples(times, times), max_size=12), start=times, end=times)
def test_the_share_is_what_counting_gives(rows: list[tuple[int, int]], start: int, end: int) -> None:
    covered = {moment for a, b in rows for moment in range(a, b)}
    inside = sum(1 for moment in range(start, end) if moment in covered)
    expected = inside / (end - start) if end > start else 0.0
    assert abs(intervals.Intervals(rows).share_of(start, end) - expected) < 1e-9
