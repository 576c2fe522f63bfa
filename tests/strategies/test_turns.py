"""Which of several models is tuned."""

from __future__ import annotations

import gc

from headway.strategies.data_parallel.decoupled.tuning.turns import MOST_IDLE_ASKS, Turn


def test_one_model_is_tuned_after_the_other() -> None:
    first, second = Turn(), Turn()
    assert first.is_free()
    first.take()
    assert first.is_free(), "for itself"
    for step in range(3 * MOST_IDLE_ASKS):
        first.steps = step
        assert not second.is_free()
    first.give_back()
    assert second.is_free()


def test_a_model_that_takes_no_steps_is_passed_over() -> None:
    first, second = Turn(), Turn()
    first.take()
    assert [second.is_free() for _ in range(MOST_IDLE_ASKS + 1)] == [False] * MOST_IDLE_ASKS + [True]
    first.steps += 1
    assert not second.is_free(), "it trains again"
    first.give_back()


def test_a_model_that_is_gone_holds_up_nobody() -> None:
    first, second = Turn(), Turn()
    first.take()
    assert not second.is_free()
    del first
    gc.collect()
    assert second.is_free()
