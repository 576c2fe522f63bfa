"""Changes of what is in force that break off train nothing on; what stock DDP cannot train, the tuner does not try."""

from __future__ import annotations

import pytest
from tests import workers

CASES = "tests.behaviour.half_way_cases"

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


@pytest.mark.parametrize("change", ["ours to ours", "stock to ours", "stock to stock"])
def test_a_change_that_breaks_off_ends_training_and_says_so(change: str) -> None:
    assert workers.run(2, f"{CASES}:broken_off", change) == [True] * 2


def test_a_change_within_a_backward_changes_nothing() -> None:
    for found in workers.run(2, f"{CASES}:not_between_steps"):
        assert len(found) == 4
        assert all("in the middle of a backward" in each for each in found[:2])
        assert all("reduction" in each for each in found[2:])  # torch's own words


def test_stock_ddp_is_not_tried_where_it_would_refuse_several_forwards() -> None:
    for forms, said in workers.run(2, f"{CASES}:several_forwards_of_other_branches"):
        assert "stock" not in forms
        assert "it looks at one forward before a backward" in said


def test_a_single_worker_of_such_a_script_is_not_left_to_stock_ddp() -> None:
    ((forms, said),) = workers.run(1, f"{CASES}:several_forwards_of_other_branches")
    assert not forms
    assert "a single worker does not communicate" in said
