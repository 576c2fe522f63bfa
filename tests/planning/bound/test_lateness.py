from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from headway.bound.step_bound import least_lateness


def test_what_is_due_first_is_served_first() -> None:
    assert least_lateness([(0, 10, 4), (0, 3, 3)]) == 0
    assert least_lateness([(0, 10, 4), (0, 4, 3)]) == -1
    assert least_lateness([(0, 100, 10), (2, 5, 3)]) == 0  # interrupts the longer one, which ends at 13
    assert least_lateness([(0, 1, 3)]) == 2


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-9, 9), st.integers(1, 5)), min_size=1, max_size=7))
def test_it_is_the_largest_excess_between_two_moments(work: list[tuple[int, int, int]]) -> None:
    excess = (
        sum(length for released, due, length in work if released >= begin and due <= end) + begin - end
        for (begin, _, _), (_, end, _) in itertools.product(work, work)
        if any(released >= begin and due <= end for released, due, _ in work)
    )
    assert least_lateness(work) == max(excess)
