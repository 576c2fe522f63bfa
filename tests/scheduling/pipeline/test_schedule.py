"""Pipeline schedules: complete, never stuck, and within the memory that they promise."""

from __future__ import annotations

import itertools
import random

import pytest

from headway.scheduling.pipeline.orders import gpipe, one_forward_one_backward
from headway.scheduling.pipeline.schedule import Action, Pass, PipelineSchedule

SIZES = list(itertools.product(range(1, 7), range(1, 10)))


def halves(schedule: PipelineSchedule) -> PipelineSchedule:
    """The same with backward in two halves, the second at the end of all."""
    ranks = []
    for actions in schedule.ranks:
        own = [a._replace(kind=Pass.INPUT_GRADIENT) if a.kind is Pass.BACKWARD else a for a in actions]
        later = [a._replace(kind=Pass.WEIGHT_GRADIENT) for a in own if a.kind is Pass.INPUT_GRADIENT]
        ranks.append((*own, *later))
    return PipelineSchedule(tuple(ranks), schedule.micro_batches)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_activations_in_flight(stages: int, micro_batches: int) -> None:
    all_at_once, in_turn = gpipe(stages, micro_batches), one_forward_one_backward(stages, micro_batches)
    for stage in range(stages):
        assert all_at_once.most_in_flight(stage) == micro_batches
        assert in_turn.most_in_flight(stage) == min(micro_batches, stages - stage)
        assert halves(in_turn).most_in_flight(stage) == micro_batches
    assert in_turn.transfers == 2 * micro_batches * (stages - 1)
    assert in_turn.rank_of_stage == tuple(range(stages))


def test_1f1b_as_it_is_drawn() -> None:
    drawn = [" ".join(map(str, actions)) for actions in one_forward_one_backward(3, 4).ranks]
    assert drawn == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_several_stages_a_rank() -> None:
    """Two chunks of a rank's own: what goes from one stage to the next on the same rank is no transfer."""
    order = [
        (kind, stage, m)
        for kind, stages in (("F", (0, 1)), ("B", (1, 0)))
        for stage in stages
        for m in (0, 1)
    ]
    alone = PipelineSchedule((tuple(Action(Pass(kind), stage, m) for kind, stage, m in order),), 2)
    assert (alone.stages, alone.transfers, alone.most_in_flight(0)) == (2, 0, 4)


def test_what_is_no_schedule() -> None:
    good = one_forward_one_backward(2, 2)
    first, second = good.ranks
    for ranks, micro_batches, said in (
        ((first, second[:-1]), 2, "micro-batch 1 goes through stage 1 as FORWARD"),
        ((first, (*second, second[0])), 2, "listed twice"),
        (((*first, second[0]), second[1:]), 2, "stage 1 is on ranks 0, 1"),
        (good.ranks, 1, "not below 1"),
        ((first, (second[1], second[0], *second[2:])), 2, "never gets past 0B0, 1B0"),
        ((), 1, "at least one stage"),
    ):
        with pytest.raises(ValueError, match=said):
            PipelineSchedule(tuple(ranks), micro_batches)


def test_stuck_is_what_a_plain_search_says() -> None:
    """Random orders of every rank, held against following any action that can be done until none can."""
    draw = random.Random(7)
    seen = set()
    for _ in range(400):
        stages, micro_batches = draw.randint(1, 3), draw.randint(1, 3)
        ranks = [list(actions) for actions in gpipe(stages, micro_batches).ranks]
        for actions in ranks:
            for _ in range(draw.randint(0, 2)):
                i, j = (draw.randrange(len(actions)) for _ in range(2))
                actions[i], actions[j] = actions[j], actions[i]
        lists = tuple(tuple(actions) for actions in ranks)
        seen.add(comes_to_its_end(lists, stages))
        try:
            PipelineSchedule(lists, micro_batches)
            assert comes_to_its_end(lists, stages)
        except ValueError:
            assert not comes_to_its_end(lists, stages)
    assert seen == {True, False}


def comes_to_its_end(ranks: tuple[tuple[Action, ...], ...], stages: int) -> bool:
    left = [list(actions) for actions in ranks]
    done: set[tuple[str, int, int]] = set()
    moved = True
    while moved:
        moved = False
        for actions in left:
            if not actions:
                continue
            kind, stage, m = actions[0]
            if kind is Pass.FORWARD:
                may = stage == 0 or ("F", stage - 1, m) in done
            else:
                may = ("F", stage, m) in done and (stage == stages - 1 or ("B", stage + 1, m) in done)
            if may:
                done.add((kind.value, stage, m))
                actions.pop(0)
                moved = True
    return not any(left)
