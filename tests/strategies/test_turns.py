"""Which of several models is tuned."""

from __future__ import annotations

from headway.strategies.adaptive.counting import MOST_IDLE_ASKS, Turn


class Model:
    """What is tuned."""


def test_one_model_is_tuned_after_the_other() -> None:
    models = Model(), Model()
    first, second = (Turn(model) for model in models)
    assert first.ask()
    first.take()
    assert first.ask(), "for itself"
    for step in range(3 * MOST_IDLE_ASKS):
        first.steps = step
        assert not second.ask()
    first.give_back()
    assert second.ask()


def test_a_model_that_takes_no_steps_is_passed_over() -> None:
    models = Model(), Model()
    first, second = (Turn(model) for model in models)
    first.take()
    assert [second.ask() for _ in range(MOST_IDLE_ASKS + 1)] == [False] * MOST_IDLE_ASKS + [True]
    first.steps += 1
    assert not second.ask(), "it trains again"
    first.give_back()


def test_a_model_that_is_gone_holds_up_nobody() -> None:
    models = [Model(), Model()]
    first, second = (Turn(model) for model in models)
    first.take()
    assert not second.ask()
    del models[0]
    assert second.ask(), "though its turn is still there"


def test_another_tuning_of_the_same_model_is_no_other_s() -> None:
    model = Model()
    before, now = Turn(model), Turn(model)
    before.take()
    assert now.ask()
    before.give_back()
