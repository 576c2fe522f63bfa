"""Trees, held against plain sums in one process, and against the rings that they replace."""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collectives.interpreter import check_halves

from headway.collectives.algorithms import ALL_GATHER, REDUCE_SCATTER, RING, TREE, sent_bytes
from headway.collectives.flat import has_rounds_to_save, tree_all_gather, tree_reduce_scatter
from headway.collectives.hierarchical import Hosts
from headway.collectives.selection import Selection

HALVES = (REDUCE_SCATTER, ALL_GATHER)


@settings(deadline=None)
@given(world_size=st.integers(1, 13), numel=st.integers(0, 150), seed=st.integers(0, 2**32))
def test_they_sum_like_one_process_however_they_interleave(world_size: int, numel: int, seed: int) -> None:
    check_halves(tree_reduce_scatter, tree_all_gather, world_size, numel, seed)


@pytest.mark.parametrize("world_size", [3, 6, 12, 24, 100])
@pytest.mark.parametrize("kind", HALVES)
def test_rounds_are_as_few_as_can_be_and_bytes_those_of_a_ring(kind: str, world_size: int) -> None:
    for rank in range(world_size):
        steps = Selection(TREE, kind).program_of(rank, world_size).steps
        assert sum(step.run for step in steps) == world_size - 1
        assert len({step.send_to for step in steps}) == ceil(log2(world_size))
        assert len(steps) <= 2 * ceil(log2(world_size))
    sent = [sent_bytes(algorithm, kind, world_size, 100 * world_size) for algorithm in (TREE, RING)]
    assert sent == [100 * (world_size - 1)] * 2


@pytest.mark.parametrize("world_size", [3, 5, 6, 12])
def test_there_is_room_for_what_any_rank_receives(world_size: int) -> None:
    numel = 1000 * world_size
    needed = Selection(TREE, REDUCE_SCATTER).scratch_numel(numel, world_size)
    for rank in range(world_size):
        program = tree_reduce_scatter(rank, world_size)
        assert program.scratch_slots * program.slot_numel(numel) <= needed <= numel
    assert Selection(TREE, ALL_GATHER).scratch_numel(numel, world_size) == 0


def test_they_are_for_numbers_of_workers_that_are_no_power_of_two() -> None:
    numbers = [number for number in range(1, 20) if has_rounds_to_save(Hosts.of_places(range(number)))]
    assert numbers == [5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 17, 18, 19]
