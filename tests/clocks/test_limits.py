from __future__ import annotations

import numpy as np
import pytest

from headway.clocks.fitting import DRIFT_PPM, Limits, errors_us

HALF_US = 1e6
APART_US = DRIFT_PPM * 1e-6 * HALF_US  # what clocks drift apart from the middle to an end


def limits(*rows: tuple[int, int, float, float]) -> Limits:
    lower, upper, place, most_us = zip(*rows, strict=True)
    return Limits(
        np.array(lower), np.array(upper), np.array(place, dtype=float), np.array(most_us, dtype=float)
    )


def both(one: int, other: int, place: float, most_us: float) -> list[tuple[int, int, float, float]]:
    return [(one, other, place, most_us), (other, one, place, most_us)]


def test_errors_add_up_along_a_chain_and_nothing_limits_a_stranger() -> None:
    rows = [row for place in (-1, 1) for pair in ((0, 1), (1, 2)) for row in both(*pair, place, 7.0)]
    assert errors_us(limits(*rows), 4, (-1.0, 1.0), HALF_US) == pytest.approx([0.0, 7.0, 14.0, np.inf])


def test_the_shorter_of_two_ways_counts() -> None:
    rows = [
        row
        for place in (-1, 1)
        for row in [*both(0, 1, place, 9.0), *both(0, 2, place, 1.0), *both(2, 1, place, 1.0)]
    ]
    assert errors_us(limits(*rows), 3, (-1.0, 1.0), HALF_US)[1] == pytest.approx(2.0)


def test_what_is_limited_from_one_side_only_is_not_limited() -> None:
    assert errors_us(limits((0, 1, 0.0, 5.0)), 2, (-1.0, 1.0), HALF_US)[1] == np.inf


def test_far_from_the_only_meeting_clocks_may_have_drifted() -> None:
    found = errors_us(limits(*both(0, 1, 0.0, 5.0)), 2, (-1.0, 3.0), HALF_US)
    assert found[1] == pytest.approx(5.0 + 3 * APART_US)


def test_two_places_limit_a_third() -> None:
    rows = [*both(0, 1, -0.5, 5.0), *both(0, 1, 0.5, 5.0)]
    # At most +5 at one and -5 at the other, so +10 at twice the distance.
    assert errors_us(limits(*rows), 2, (-1.0, 1.0), HALF_US)[1] == pytest.approx(10.0)


def test_a_broken_limit_is_worth_what_it_is_broken_by() -> None:
    rows = [*both(0, 1, -1.0, -30.0), *both(0, 1, 1.0, -30.0)]
    assert errors_us(limits(*rows), 2, (-1.0, 1.0), HALF_US)[1] == pytest.approx(30.0)
