"""Halving and doubling, held against plain sums in one process, and against the rings that they replace."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collectives.interpreter import check_halves
from tests.collectives.on_clusters import cluster_of

from headway.cluster import AlgorithmCost
from headway.collectives.algorithms import ALL_GATHER, HALVING_DOUBLING, REDUCE_SCATTER, RING, sent_bytes
from headway.collectives.flat import doubling_all_gather, halving_reduce_scatter
from headway.collectives.hierarchical import Hosts
from headway.collectives.selection import Algorithms, Selection
from headway.errors import PlanError
from headway.network.collective_costs import Measured, fit_cost, replayed_seconds

MIB = 2**20
HALVES = (REDUCE_SCATTER, ALL_GATHER)


@settings(deadline=None)
@given(world_size=st.sampled_from([1, 2, 4, 8, 16]), numel=st.integers(0, 150), seed=st.integers(0, 2**32))
def test_they_sum_like_one_process_however_they_interleave(world_size: int, numel: int, seed: int) -> None:
    check_halves(halving_reduce_scatter, doubling_all_gather, world_size, numel, seed)


@pytest.mark.parametrize("kind", HALVES)
def test_a_round_is_one_message_and_all_carry_what_a_ring_does(kind: str) -> None:
    for rank in range(16):
        steps = Selection(HALVING_DOUBLING, kind, 2).program_of(rank, 16).steps
        assert sorted(step.run for step in steps) == [1, 2, 4, 8]
        assert all(step.send_to == step.receive_from for step in steps)
    sent = [sent_bytes(algorithm, kind, 16, 1600) for algorithm in (HALVING_DOUBLING, RING)]
    assert sent == [1500, 1500]


def test_the_largest_messages_of_two_rounds_have_room() -> None:
    assert Selection(HALVING_DOUBLING, REDUCE_SCATTER).scratch_numel(4000, 8) == 2 * 2000
    assert Selection(HALVING_DOUBLING, ALL_GATHER).scratch_numel(4000, 8) == 0


@pytest.mark.parametrize("world_size", [3, 6, 12])
def test_other_numbers_of_ranks_are_refused(world_size: int) -> None:
    algorithms = Algorithms(HALVING_DOUBLING, HALVING_DOUBLING)
    for kind in HALVES:
        with pytest.raises(PlanError, match=f"a power of two.*{world_size} workers"):
            algorithms.select(kind, MIB, world_size).on(Hosts.of_places(range(world_size)))
        with pytest.raises(PlanError, match="a power of two"):
            Selection(HALVING_DOUBLING, kind).program_of(0, world_size)


def test_what_is_fitted_replays_as_long_as_was_measured() -> None:
    """Its messages are of many sizes: their costs are looked up by the mean, as they are fitted."""
    cluster = cluster_of(8)
    programs = [halving_reduce_scatter, doubling_all_gather]
    ideal_s = {
        size: replayed_seconds(cluster, programs, size, AlgorithmCost())
        for size in (8_000, 200_000, 1_600_000)
    }
    measured = [Measured(size, seconds + 0.001) for size, seconds in ideal_s.items()]
    found = fit_cost(cluster, programs, measured)
    assert [each.size_bytes for each in found.by_size] == [round(size * 7 / 8 / 3) for size in ideal_s]
    for each in measured:
        assert replayed_seconds(cluster, programs, each.size_bytes, found) == pytest.approx(
            each.seconds, rel=0.01
        )
