"""What the benchmark of passes says of signs."""

from __future__ import annotations

import pytest

from passes import sign_of


@pytest.mark.parametrize(
    ("predicted_ratio", "low", "high", "expected"),
    [
        (0.8, 0.7, 0.9, "right"),
        (1.2, 1.1, 1.4, "right"),
        (0.8, 1.1, 1.4, "wrong"),
        (1.2, 0.7, 0.9, "wrong"),
        (0.8, 0.9, 1.1, "not told"),
        (1.0, 1.1, 1.4, "not told"),
    ],
)
def test_a_sign_is_right_where_both_ratios_lie_on_one_side_of_1(
    predicted_ratio: float, low: float, high: float, expected: str
) -> None:
    assert sign_of(predicted_ratio, low, high) == expected
