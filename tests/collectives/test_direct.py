"""Direct halves, held against plain sums in one process, and against the rings that they replace."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collectives.interpreter import check_halves
from tests.collectives.on_clusters import cluster_of

from headway.cluster import AlgorithmCost
from headway.collectives.algorithms import ALL_GATHER, ALL_REDUCE, DIRECT, REDUCE_SCATTER, RING
from headway.collectives.flat import direct_all_gather, direct_reduce_scatter
from headway.collectives.selection import Selection
from headway.errors import PlanError

HALVES = (REDUCE_SCATTER, ALL_GATHER)


@settings(deadline=None)
@given(
    world_size=st.integers(1, 9),
    pieces=st.integers(1, 3),
    numel=st.integers(0, 150),
    seed=st.integers(0, 2**32),
)
def test_they_sum_like_one_process_however_they_interleave(
    world_size: int, pieces: int, numel: int, seed: int
) -> None:
    scatter = partial(direct_reduce_scatter, pieces=pieces)
    gather = partial(direct_all_gather, pieces=pieces)
    check_halves(scatter, gather, world_size, numel, seed)


def test_all_that_is_added_up_has_its_own_place_and_what_is_gathered_lands_where_it_belongs() -> None:
    assert Selection(DIRECT, REDUCE_SCATTER, 2).scratch_numel(4000, 4) == 3 * 1000
    assert Selection(DIRECT, ALL_GATHER, 2).scratch_numel(4000, 4) == 0


def test_there_is_no_direct_all_reduce() -> None:
    with pytest.raises(PlanError, match="direct does not support this collective"):
        Selection(DIRECT, ALL_REDUCE).program_of(0, 2)


def test_what_nobody_measured_costs_what_rings_do() -> None:
    ring, own = AlgorithmCost(overhead_us=5), AlgorithmCost(overhead_us=7)
    selection = Selection(DIRECT, ALL_GATHER, 2)
    cluster = cluster_of(4).model_copy(update={"algorithms": {RING: ring}})
    assert selection.cost(cluster) == ring
    measured = cluster.model_copy(update={"algorithms": {"ring_2": ring, DIRECT: own}})
    assert selection.cost(measured) == own
