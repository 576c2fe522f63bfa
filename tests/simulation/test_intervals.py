from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headway.simulation.intervals import Intervals

moments = st.integers(0, 100)


@given(spans=st.lists(st.tuples(moments, moments), max_size=12), start=moments, end=moments)
def test_the_share_is_what_counting_gives(spans: list[tuple[int, int]], start: int, end: int) -> None:
    covered = {moment for a, b in spans for moment in range(a, b)}
    inside = sum(1 for moment in range(start, end) if moment in covered)
    expected = inside / (end - start) if end > start else 0.0
    assert abs(Intervals(spans).share_of(start, end) - expected) < 1e-9
