"""Group schedules: nobody in two groups at a time, everybody reached."""

from __future__ import annotations

import itertools

import pytest
from tests.scheduling.group_schedules import pairs_in_turn, rounds_to_mix

from headway.scheduling.groups import GroupSchedule


@pytest.mark.parametrize("world_size", range(2, 13))
def test_everybody_meets_everybody_once(world_size: int) -> None:
    schedule = pairs_in_turn(world_size)
    met = [pair for groups in schedule.rounds for pair in groups]
    assert sorted(met) == sorted(itertools.combinations(range(world_size), 2))
    assert len(schedule.rounds) == world_size - 1 + world_size % 2
    mixed_after = rounds_to_mix(schedule)
    assert mixed_after is not None
    assert mixed_after <= len(schedule.rounds)
    for rank, round_ in itertools.product(range(world_size), range(3 * world_size)):
        group = schedule.group_of(rank, round_)
        assert group == () or rank in group
        assert group in ((), *schedule.rounds[round_ % len(schedule.rounds)])


def test_what_never_mixes() -> None:
    assert rounds_to_mix(GroupSchedule(4, (((0, 1), (2, 3)),))) is None
    assert rounds_to_mix(GroupSchedule(4, (((0, 1), (2, 3)), ((0, 2), (1, 3))))) == 2
    assert rounds_to_mix(GroupSchedule(4, (((0, 1, 2, 3),),))) == 1


def test_what_is_no_schedule() -> None:
    for rounds, said in (
        ((), "at least one round"),
        ((((0, 1), (1, 2)),), "two groups of round 0"),
        ((((0, 4),),), "not below 4"),
        ((((0,),),), "one rank"),
        ((((1, 0),),), "out of order"),
    ):
        with pytest.raises(ValueError, match=said):
            GroupSchedule(4, rounds)
    with pytest.raises(ValueError, match="two ranks"):
        pairs_in_turn(1)
