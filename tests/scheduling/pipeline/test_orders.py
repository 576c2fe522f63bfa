"""The known orders: what they hold, and whom they let wait."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from headway.scheduling.pipeline.orders import (
    ORDERS,
    eager_one_forward_one_backward,
    gpipe,
    grouped,
    interleaved,
    looped,
    one_forward_one_backward,
    zero_bubble,
)
from headway.scheduling.pipeline.schedule import Pass, PipelineSchedule, bubble, ideal_times

MOST_STAGES, MOST_MICRO_BATCHES = 6, 10


def all_of(stages: int) -> Iterator[PipelineSchedule]:
    """Every order of so many stages, and of all numbers of micro-batches and sizes of groups up to the bound."""
    for micro_batches in range(1, MOST_MICRO_BATCHES + 1):
        yield from (order(stages, micro_batches) for order in ORDERS.values())
        yield from (grouped(stages, micro_batches, size) for size in range(2, micro_batches + 2))
        whole = [ranks for ranks in range(1, stages + 1) if stages % ranks == 0]
        yield from (looped(ranks, stages // ranks, micro_batches) for ranks in whole)
        yield from (
            interleaved(ranks, stages // ranks, micro_batches)
            for ranks in whole
            if micro_batches % ranks == 0
        )


@pytest.mark.parametrize("stages", range(1, MOST_STAGES + 1))
def test_what_stages_hold(stages: int) -> None:
    for micro_batches, stage in itertools.product(range(1, MOST_MICRO_BATCHES + 1), range(stages)):
        left = stages - stage
        for size in range(1, micro_batches + 2):
            held = grouped(stages, micro_batches, size).most_in_flight(stage)
            assert held == min(micro_batches, size * left)
        eager = eager_one_forward_one_backward(stages, micro_batches)
        assert eager.most_in_flight(stage) == min(micro_batches, 2 * left - 1)
        assert zero_bubble(stages, micro_batches).most_in_flight(stage) == min(micro_batches, stages)
        assert gpipe(stages, micro_batches).most_in_flight(stage) == micro_batches


def test_groups_of_one_and_of_all() -> None:
    for stages, micro_batches in itertools.product(range(1, 5), range(1, 8)):
        assert grouped(stages, micro_batches, 1) == one_forward_one_backward(stages, micro_batches)
        assert grouped(stages, micro_batches, micro_batches + 3) == gpipe(stages, micro_batches)


def test_bubbles() -> None:
    """1F1B and GPipe wait (S-1)/(M+S-1) of the time, interleaving a part of that, zero-bubble a third of 1F1B's."""
    for stages, micro_batches in ((2, 4), (4, 8), (4, 16), (8, 32)):
        expected = (stages - 1) / (micro_batches + stages - 1)
        for size in range(1, micro_batches + 1):
            if micro_batches % size == 0:
                assert bubble(grouped(stages, micro_batches, size)) == pytest.approx(expected)
        # (S-1)(F+I-W) in the place of (S-1)(F+B): one unit for three.
        total = ideal_times(zero_bubble(stages, micro_batches)).total
        assert total == 3 * micro_batches + stages - 1
        twice = interleaved(stages, 2, micro_batches)
        assert ideal_times(twice).total == 2 * 3 * micro_batches + 3 * (stages - 1)
    assert bubble(one_forward_one_backward(1, 5)) == 0


def test_as_they_are_drawn_in_their_papers() -> None:
    def drawn(schedule: PipelineSchedule, rank: int) -> str:
        return " ".join(f"{action.kind.value}{action.micro_batch}" for action in schedule.ranks[rank])

    assert drawn(grouped(2, 4, 2), 0) == "F0 F1 F2 F3 B0 B1 B2 B3"
    assert drawn(grouped(2, 6, 2), 1) == "F0 F1 B0 B1 F2 F3 B2 B3 F4 F5 B4 B5"
    assert drawn(grouped(2, 5, 2), 0) == "F0 F1 F2 F3 B0 B1 F4 B2 B3 B4"
    assert drawn(eager_one_forward_one_backward(2, 5), 0) == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
    assert drawn(zero_bubble(2, 3), 0) == "F0 F1 I0 W0 F2 I1 W1 I2 W2"
    assert drawn(zero_bubble(2, 3), 1) == "F0 I0 F1 I1 W0 F2 I2 W1 W2"
    assert " ".join(map(str, interleaved(2, 2, 2).ranks[1])) == "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    assert " ".join(map(str, looped(2, 2, 2).ranks[1])) == "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"


def test_zero_bubble_halves_every_backward() -> None:
    kinds = {action.kind for actions in zero_bubble(3, 5).ranks for action in actions}
    assert kinds == {Pass.FORWARD, Pass.INPUT_GRADIENT, Pass.WEIGHT_GRADIENT}


def test_what_there_is_no_order_for() -> None:
    for order in ORDERS.values():
        for stages, micro_batches in ((0, 1), (1, 0), (-1, 3)):
            with pytest.raises(ValueError, match="at least one"):
                order(stages, micro_batches)
    with pytest.raises(ValueError, match="a group has at least one"):
        grouped(2, 4, 0)
    with pytest.raises(ValueError, match="7 micro-batches are no multiple of the 2 ranks"):
        interleaved(2, 2, 7)
