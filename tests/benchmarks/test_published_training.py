"""Published training rates, as ``benchmarks/published.py`` judges predictions by them."""

from __future__ import annotations

import pytest
from published_training import CASES, DEVICE_CASES, training_row


@pytest.mark.parametrize("case", DEVICE_CASES)
def test_most_rates_of_one_device_are_within_the_stated_uncertainty(case: str) -> None:
    row = training_row(case)
    assert row["rows"] >= 3
    assert int(row["within ±"].rstrip("%")) >= 80


@pytest.mark.exhaustive
def test_two_measured_steps_tell_the_others() -> None:
    row = training_row(CASES[-1])
    assert row["rows"] >= 19
    assert float(row["median error"].rstrip("%")) <= 6
