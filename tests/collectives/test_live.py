"""The live executor moves and adds exactly what the chunk programs say."""

from __future__ import annotations

import pytest
from tests import workers

from headway.collectives.program import ring_all_gather, ring_all_reduce, ring_reduce_scatter, scratch_numel

CASES = "tests.collectives.live_cases"


def nothing_is_wrong(world_size: int, *names: str) -> None:
    for problems in workers.run(
        world_size, f"{CASES}:check_in_turn", names, timeout_s=100, group_timeout_s=60
    ):
        assert problems == []


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_rings(world_size: int) -> None:
    nothing_is_wrong(
        world_size,
        "check_rings",
        "check_every_number_of_pieces",
        "check_without_torchscript",
        "check_prepared_again_and_again",
    )


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [8, pytest.param(16, marks=pytest.mark.exhaustive)])
def test_large_rings(world_size: int) -> None:
    nothing_is_wrong(world_size, "check_rings", "check_prepared_again_and_again")


@pytest.mark.processes
@pytest.mark.parametrize("places", ["a", "ab", "aaa", "aabb", "abab", "aabbcc"])
def test_hierarchical_collectives(places: str) -> None:
    for problems in workers.run(
        len(places), f"{CASES}:check_hierarchical", places, timeout_s=100, group_timeout_s=60
    ):
        assert problems == []


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_direct_halves(world_size: int) -> None:
    nothing_is_wrong(world_size, "check_direct")


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_halving_and_doubling(world_size: int) -> None:
    nothing_is_wrong(world_size, "check_halving_doubling")


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [1, 3, 6])
def test_trees(world_size: int) -> None:
    nothing_is_wrong(world_size, "check_trees")


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_native_forms(world_size: int) -> None:
    nothing_is_wrong(world_size, "check_native")


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 3])
def test_two_groups_at_a_time(world_size: int) -> None:
    nothing_is_wrong(world_size, "check_two_groups_at_a_time")


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_peer_that_is_gone_is_an_error_of_one_reason(world_size: int) -> None:
    *here, _gone = workers.run(world_size, f"{CASES}:run_while_a_peer_is_gone", group_timeout_s=5)
    for reason in here:
        assert reason != "nothing"
        assert "Traceback" not in reason
        assert reason


@pytest.mark.parametrize(
    ("numel", "chunks", "two_chunks"), [(0, 3, 0), (1, 3, 2), (6, 3, 4), (7, 3, 6), (9, 1, 0)]
)
def test_scratch_holds_two_chunks(numel: int, chunks: int, two_chunks: int) -> None:
    assert scratch_numel(numel, chunks) == two_chunks


@pytest.mark.parametrize("world_size", range(1, 17))
@pytest.mark.parametrize("pieces", range(1, 5))
def test_scratch_is_what_programs_use(world_size: int, pieces: int) -> None:
    slots = scratch_numel(world_size * pieces, world_size, pieces)
    assert ring_reduce_scatter(0, world_size, pieces).scratch_slots == slots
    assert ring_all_reduce(0, world_size, pieces).scratch_slots == slots
    assert ring_all_gather(0, world_size, pieces).scratch_slots == 0
