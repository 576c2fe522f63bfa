"""The static schedule: no conflicts, groups as large as allowed, and everybody mixes with everybody."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.scheduling.group_schedules import rounds_to_mix

from headway.scheduling.groups import hosts_in_turn


@settings(deadline=None, max_examples=examples(200))
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=40), group_size=st.integers(2, 8))
def test_any_workers_on_any_hosts_mix_within_two_repetitions(sizes: list[int], group_size: int) -> None:
    if sum(sizes) < 2:
        sizes = [*sizes, 1]
    first = [sum(sizes[:number]) for number in range(len(sizes))]
    hosts = [list(range(begin, begin + size)) for begin, size in zip(first, sizes, strict=True)]
    host_of = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
    schedule = hosts_in_turn(hosts, group_size)
    assert schedule.world_size == sum(sizes)
    levels = math.ceil(math.log(len(hosts), group_size) - 1e-9) if len(hosts) > 1 else 1
    assert len(schedule.rounds) <= 2 * levels
    mixed_after = rounds_to_mix(schedule)
    assert mixed_after is not None
    assert mixed_after <= 2 * len(schedule.rounds)
    for number, groups in enumerate(schedule.rounds):
        crossing = [group for group in groups if len({host_of[rank] for rank in group}) > 1]
        within = max(sizes) > 1 and number % 2 == 0
        assert not (within and crossing)
        for group in crossing:
            assert len({host_of[rank] for rank in group}) == len(group) <= group_size
        if within:
            assert sorted(map(list, groups)) == [ranks for ranks in hosts if len(ranks) > 1]


@pytest.mark.parametrize(("hosts", "workers", "rounds"), [(4, 4, 3), (2, 8, 3), (16, 4, 5), (1, 4, 1)])
def test_equal_hosts_mix_in_hardly_more_rounds_than_there_are(hosts: int, workers: int, rounds: int) -> None:
    ranks = [list(range(host * workers, (host + 1) * workers)) for host in range(hosts)]
    assert rounds_to_mix(hosts_in_turn(ranks, 4)) == rounds


def test_what_cannot_be_scheduled() -> None:
    for hosts, size, said in (
        ([[0]], 2, "two ranks"),
        ([[0], [1]], 1, "two ranks"),
        ([[0, 1], [1, 2]], 2, "two groups"),
    ):
        with pytest.raises(ValueError, match=said):
            hosts_in_turn(hosts, size)
