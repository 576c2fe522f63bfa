"""Rows of the data-parallel benchmark: what tuning costs, and when that is paid back."""

from __future__ import annotations

import pytest
from paced_training.page import tuning_words
from paced_training.rows import tuning_cost


def test_tuning_is_paid_back_by_what_it_gains_a_step() -> None:
    found = tuning_cost([120.0] * 9 + [320.0], time_ms=90.0, default_ms=100.0)
    assert found["tuning_steps"] == 10
    assert found["tuning_lost_steps"] == pytest.approx(4.0)
    assert found["tuning_paid_back_steps"] == pytest.approx(40.0)
    assert (
        tuning_words(found)
        == "10 steps until tuned took as long as 14.0 of default DDP's; paid back 40 steps later"
    )


def test_tuning_that_loses_nothing_is_paid_back_at_once() -> None:
    assert tuning_cost([90.0] * 4, time_ms=80.0, default_ms=100.0)["tuning_paid_back_steps"] == 0.0


def test_what_gains_nothing_is_never_paid_back() -> None:
    found = tuning_cost([110.0] * 4, time_ms=100.0, default_ms=100.0)
    assert "tuning_paid_back_steps" not in found
    assert tuning_words(found) == "4 steps until tuned took as long as 4.4 of default DDP's"


def test_methods_that_are_not_tuned_in_a_job_say_nothing() -> None:
    assert tuning_cost([], 1.0, 1.0) == {}
