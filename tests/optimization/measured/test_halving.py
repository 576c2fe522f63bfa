"""Successive halving: the rule by itself, on made-up runs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.optimization.measured import (
    LEAST_ROUNDS,
    LEAST_STEPS,
    MOST_STEPS,
    Measured,
    Round,
    Runs,
    compared,
    first_steps,
    measured,
    most_runs,
    next_round,
    run_rounds,
    winner,
)


def played(times_ms: Sequence[float], kept: int, failing: frozenset[int] = frozenset()) -> list[Runs]:
    """All rounds where each contender takes the same time in every step; the ``failing`` fail in their second round."""

    def run(number: int, steps: int) -> list[float]:
        return [] if number in failing and steps > first_steps(50.0) else [times_ms[number]] * steps

    told: list[Sequence[Runs]] = []
    rounds = run_rounds(len(times_ms), range(kept), run, 50.0, told.append)
    assert told[-1:] == ([rounds] if rounds else [])
    return rounds


def test_half_is_dropped_and_the_others_run_twice_as_long_the_other_way_round() -> None:
    times_ms = [10.0, 8.0, 7.0, 9.0, 6.0]  # the first is kept
    rounds: list[Round] = []
    so_far: list[Runs] = []
    while (coming := next_round(range(5), [0], so_far, 50.0)) is not None:
        rounds.append(coming)
        so_far.append({number: [times_ms[number]] * coming.steps for number in coming.order})
    assert rounds == [Round((0, 1, 2, 3, 4), 40), Round((4, 2, 0), 80), Round((0, 4), 160)]
    assert winner(so_far, [0], range(5)) == 4


@given(
    st.lists(st.floats(1, 100), min_size=1, max_size=12),
    st.integers(0, 2),
    st.sets(st.integers(2, 13), max_size=3),
)
def test_the_fastest_wins_and_what_is_kept_runs_in_every_round(
    plans_ms: list[float], kept: int, failing: set[int]
) -> None:
    times_ms = [50.0] * kept + plans_ms
    so_far = played(times_ms, kept)
    assert all(set(range(kept)) <= set(runs) for runs in so_far)
    assert sum(map(len, so_far)) == most_runs(len(times_ms), kept)
    assert len(so_far) >= LEAST_ROUNDS
    won = winner(so_far, range(kept), range(len(times_ms)))
    assert times_ms[won] == pytest.approx(min(times_ms))
    out = frozenset(failing & set(range(kept, len(times_ms))))
    left = played(times_ms, kept, out)
    alive = [number for number in range(len(times_ms)) if number not in out]
    ran_twice = [number for number in alive if sum(number in runs for runs in left) >= LEAST_ROUNDS]
    if ran_twice:
        assert winner(left, range(kept), alive) in ran_twice


def test_of_equals_nothing_is_changed() -> None:
    assert winner(played([50.0, 50.0, 50.0], 1), [0], range(3)) == 0


def test_a_gain_that_differs_from_round_to_round_by_more_than_itself_is_none() -> None:
    steady: list[Runs] = [{0: [50.0] * 10, 1: [45.0] * 10}, {0: [50.0] * 20, 1: [46.0] * 20}]
    assert winner(steady, [0], [0, 1]) == 1
    unsteady: list[Runs] = [{0: [50.0] * 10, 1: [40.0] * 10}, {0: [50.0] * 20, 1: [49.0] * 20}]
    assert compared(unsteady, 1, 0).ratio < 0.95
    assert winner(unsteady, [0], [0, 1]) == 0


def test_what_the_machine_does_from_round_to_round_counts_for_none() -> None:
    slower = [{0: [100.0] * 10, 1: [90.0] * 10, 2: [95.0] * 10}, {0: [300.0] * 20, 1: [270.0] * 20}]
    first, second = (compared(slower, number, 0) for number in (1, 2))
    assert [first.ratio, second.ratio] == pytest.approx([0.9, 0.95])
    assert first.spread == pytest.approx(0.0)
    assert measured(slower, 1).step_ms > measured(slower, 2).step_ms, "which is not to be read as slower"


def test_none_that_was_dropped_is_ahead_of_the_winner() -> None:
    """Contender 1 is fast in the first round alone, 2 and 3 are as fast in every round."""
    times_ms = {0: [50.0] * 9, 1: [30.0] + [60.0] * 8, 2: [40.0] * 9, 3: [41.0] * 9}
    ran: dict[int, int] = dict.fromkeys(times_ms, 0)

    def run(number: int, steps: int) -> list[float]:
        ran[number] += 1
        return [times_ms[number][ran[number] - 1]] * steps

    so_far = run_rounds(4, [0], run, 50.0)
    ratios = {number: compared(so_far, number, 0).ratio for number in times_ms}
    won = winner(so_far, [0], range(4))
    assert won == 2
    assert min(ratios, key=ratios.__getitem__) == won


@pytest.mark.parametrize(("step_ms", "steps"), [(1.0, MOST_STEPS), (50.0, 40), (5000.0, LEAST_STEPS)])
def test_how_long_the_first_runs_are_is_bounded(step_ms: float, steps: int) -> None:
    assert first_steps(step_ms) == steps


def test_steps_that_something_disturbed_do_not_count() -> None:
    found = Measured.of([[10.0, 10.2, 9.8, 900.0], [11.0, 11.0, 11.0, 11.0]])
    assert found.runs_ms == pytest.approx((10.0, 11.0))
    assert found.steps == (3, 4)
    assert found.step_ms == pytest.approx((30 + 44) / 7)
    assert found.spread_ms == pytest.approx(0.5)


def test_the_spread_of_one_run_is_that_of_its_steps() -> None:
    found = Measured.of([[9.0, 11.0] * 8])
    assert found.step_ms == 10.0
    assert found.spread_ms == pytest.approx(2 * (16 / 15) ** 0.5 / 4)


def test_rounds_of_one_contender_are_taken_together_by_their_steps() -> None:
    so_far: list[Runs] = [{0: [10.0] * 10, 1: [5.0] * 10}, {0: [13.0] * 20}]
    assert measured(so_far, 0).step_ms == pytest.approx(12.0)
    assert measured(so_far, 1).runs_ms == (5.0,)
