"""The history: parts that agree with the diagnosis, a bounded number of bars, and steps that stand out."""

from __future__ import annotations

import numpy as np
import pytest
from tests.synthetic import SyntheticJob, synthetic_trace

from headway.diagnosis import diagnose
from headway.diagnosis.breakdown import PARTS
from headway.diagnosis.communication import match
from headway.report.history import MAX_BARS, MAX_OUTLIERS, History, history, rank_times, top_ms


def history_of(job: SyntheticJob, max_bars: int = MAX_BARS) -> History:
    trace = synthetic_trace(job)
    return history(rank_times(trace, trace.steps, match(trace)), trace.steps, max_bars)


def test_parts_add_up_and_agree_with_the_diagnosis() -> None:
    job = SyntheticJob(steps=10, slow={(2, "backward"): 9.0, (1, "input"): 3.0}, jitter=0.2)
    found = diagnose(synthetic_trace(job))
    past = history_of(job)
    for bar in past.bars:
        assert sum(bar.parts_ms) == pytest.approx(bar.median_ms, rel=0.05)
        assert bar.median_ms <= bar.max_ms
    for index, part in enumerate(PARTS):
        mean = np.mean([getattr(parts, part) for parts in found.breakdown.values()])
        assert np.mean([bar.parts_ms[index] for bar in past.bars]) == pytest.approx(mean, abs=1e-6)


def test_steps_that_stand_out_are_named_with_what_grew() -> None:
    past = history_of(SyntheticJob(steps=20, slow={(1, "input"): 30.0}, slow_steps=(4, 11), jitter=0.05))
    assert {one.step for one in past.outliers} == {4, 11}
    assert [bar.step for bar in past.bars if bar.stands_out] == [4, 11]
    assert {one.part for one in past.outliers} == {"straggler_wait"}
    assert all(15 < one.grew_ms <= 30 * 3 / 4 for one in past.outliers)  # three of four ranks wait


def test_even_steps_do_not_stand_out() -> None:
    assert history_of(SyntheticJob(steps=30, jitter=0.1)).outliers == ()
    assert history_of(SyntheticJob(steps=2, slow={(0, "forward"): 50.0}, slow_steps=(1,))).outliers == ()


def test_many_steps_become_few_bars_that_keep_the_longest() -> None:
    past = history_of(SyntheticJob(steps=205, slow={(0, "forward"): 80.0}, slow_steps=(77,)), max_bars=20)
    assert past.steps_a_bar == 11
    assert len(past.bars) == 19
    assert [bar.of_steps for bar in past.bars][:2] == [(0, 10), (11, 21)]
    assert past.bars[-1].of_steps == (198, 204)
    assert past.bars[7].step == 77
    assert past.bars[7].max_ms == max(bar.max_ms for bar in past.bars)


def test_outliers_are_bounded_and_counted() -> None:
    slow = tuple(range(0, 90, 3))
    past = history_of(SyntheticJob(steps=90, slow={(0, "forward"): 40.0}, slow_steps=slow))
    assert past.outlying == len(slow)
    assert len(past.outliers) == MAX_OUTLIERS


def test_one_step_far_too_long_does_not_flatten_the_others() -> None:
    past = history_of(SyntheticJob(steps=10, slow={(0, "rest"): 10_000.0}, slow_steps=(0,)))
    assert max(bar.max_ms for bar in past.bars) > 10_000
    assert top_ms(past) == pytest.approx(4 * past.median_ms)
