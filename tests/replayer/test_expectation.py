"""What is claimed of a plan is counted from the record, never from a replay that is slower than it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.simulator.expectation import (
    OTHER_SHARE,
    SAME_SHARE,
    Expectation,
    crowded,
    expected_ms,
    half_width_ms,
)

RESULTS = Path(__file__).parents[2] / "benchmarks/results/replay_accuracy.json"


@pytest.mark.parametrize(
    ("reproduced_ms", "same", "other"),
    [(110.0, 80.0, 88.0), (100.0, 88.0, 88.0), (88.0, 100.0, 100.0)],
)
def test_a_gain_is_counted_from_the_record(reproduced_ms: float, same: float, other: float) -> None:
    def expected(same_strategy: bool) -> float:
        return expected_ms(88.0, recorded_ms=100.0, reproduced_ms=reproduced_ms, same_strategy=same_strategy)

    assert expected(True) == pytest.approx(same)
    assert expected(False) == pytest.approx(other)


def test_a_slow_replay_of_the_record_makes_no_gain_of_another_strategy() -> None:
    # 110 ms replayed, 100 recorded: the plan's 80 ms are 1.25 times as fast, and not 110 / 80 = 1.38.
    step_ms = expected_ms(80.0, recorded_ms=100.0, reproduced_ms=110.0, same_strategy=False)
    assert Expectation(100.0, step_ms, 1.0).speedup == pytest.approx(1.25)


def test_the_recorded_job_gains_nothing_on_itself() -> None:
    step_ms = expected_ms(110.0, recorded_ms=100.0, reproduced_ms=110.0, same_strategy=True)
    assert Expectation(100.0, step_ms, 1.0).speedup == pytest.approx(1.0)


def test_errors_add_up_as_independent_ones() -> None:
    def width(recorded_error_ms: float, reproduction_error: float, links_ms: float) -> float:
        return half_width_ms(
            100.0,
            recorded_error_ms=recorded_error_ms,
            reproduction_error=reproduction_error,
            model_share=0.03,
            links_ms=links_ms,
        )

    assert width(0.0, 0.0, 0.0) == pytest.approx(3.0)
    assert width(0.0, 0.04, 0.0) == pytest.approx(5.0)
    assert width(2.0, 0.0, 0.0) == pytest.approx(5.0)
    assert width(0.0, 0.0, 2.0) == pytest.approx(3.0)
    assert width(0.0, 0.0, 30.0) == pytest.approx(30.0)


def test_cores_are_crowded_where_they_have_more_to_do_at_a_time() -> None:
    assert crowded(8, 1000.0, 4, 1000.0, cores=2)
    assert not crowded(8, 2000.0, 4, 1000.0, cores=2)
    assert not crowded(8, 1000.0, 4, 1000.0, cores=None)
    assert not crowded(8, 1000.0, 4, 1000.0, cores=16)


def test_plans_within_the_other_s_uncertainty_cannot_be_told_apart() -> None:
    best, near, far = (Expectation(100.0, step_ms, 2.0) for step_ms in (90.0, 91.9, 92.1))
    assert best.like(near)
    assert not best.like(far)
    assert not best.may_gain_nothing
    assert Expectation(100.0, 99.0, 2.0).may_gain_nothing


def test_nine_of_ten_kept_measurements_lie_within_what_is_stated() -> None:
    rows = json.loads(RESULTS.read_text())["rows"]
    base = {row["case"]: row for row in reversed(rows) if row["class"] == "reproduction"}
    within = []
    for row in rows:
        if row["class"] in ("reproduction", "crowded"):
            continue
        own, same = base[row["case"]], row["method"].startswith("ddp")
        step_ms = expected_ms(
            row["predicted_ms"],
            recorded_ms=own["time_ms"],
            reproduced_ms=own["predicted_ms"],
            same_strategy=same,
        )
        width_ms = half_width_ms(
            step_ms,
            recorded_error_ms=0.0,
            reproduction_error=abs(own["error"]),
            model_share=SAME_SHARE if same else OTHER_SHARE,
        )
        within.append(abs(step_ms - row["time_ms"]) <= width_ms)
    assert len(within) > 100
    assert 0.85 <= sum(within) / len(within) <= 0.95
