"""Chunk programs on the links of a cluster: what replay says of one collective by itself."""

from __future__ import annotations

import pytest

from headway.cluster import AlgorithmCost, Cluster, Host
from headway.collectives.algorithms import (
    ALL_GATHER,
    ALL_REDUCE,
    KINDS,
    NATIVE,
    REDUCE_SCATTER,
    RING,
    program_of,
)
from headway.collectives.dataflow import expand
from headway.collectives.program import ProgramOf, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from headway.collectives.resources import ClusterResources
from headway.simulation.engine import play

RINGS = (ring_reduce_scatter, ring_all_gather, ring_all_reduce)
COST = AlgorithmCost()


def cluster(world_size: int, latency_us: float = 0) -> Cluster:
    hosts = tuple(Host(name=f"h{i}", workers=1, up_gbps=1, down_gbps=1) for i in range(world_size))
    return Cluster(hosts=hosts, latency_us=latency_us)


def end_ns(
    on: Cluster, program_of: ProgramOf, size_bytes: int, cost: AlgorithmCost = COST, late_ns: int = 0
) -> list[int]:
    """When each rank is done where rank 0 begins ``late_ns`` after the others."""
    resources = ClusterResources(on)
    builder = resources.builder()
    begins = [builder.operation(late_ns if rank == 0 else 0) for rank in range(on.world_size)]
    ends = [builder.operation() for _ in range(on.world_size)]
    expand(builder, resources, program_of, size_bytes, begins, ends, cost)
    finished: list[int] = play(builder.close()).end_ns[ends].tolist()
    return finished


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_change_nothing_where_links_cost_nothing_but_bytes(world_size: int, kind: str) -> None:
    size_bytes = 125 * 840 * 4
    whole = end_ns(cluster(world_size), program_of(RING, kind), size_bytes)
    for pieces in (2, 3, 4):
        cut = end_ns(cluster(world_size), program_of(RING, kind, pieces), size_bytes)
        assert cut == pytest.approx(whole, rel=1e-4)


def test_pieces_hide_latency_behind_the_bytes_of_the_next() -> None:
    on = cluster(4, latency_us=500)
    whole = max(end_ns(on, program_of(RING, ALL_GATHER), 4_000_000))
    cut = max(end_ns(on, program_of(RING, ALL_GATHER, 2), 4_000_000))
    assert whole == 3 * (8_000_000 + 500_000)
    assert cut == 3 * 8_000_000 + 500_000


def test_a_rank_that_comes_late_delays_what_it_receives_and_what_it_sends() -> None:
    on_time = max(end_ns(cluster(2), ring_reduce_scatter, 1_000_000))
    assert end_ns(cluster(2), ring_reduce_scatter, 1_000_000, late_ns=5_000) == [on_time + 5_000] * 2


def test_overhead_is_paid_once_and_the_factor_for_every_byte() -> None:
    cost = AlgorithmCost(overhead_us=100, byte_factor=1.5)
    plain = max(end_ns(cluster(2), ring_all_reduce, 1_000_000))
    assert max(end_ns(cluster(2), ring_all_reduce, 1_000_000, cost)) == 100_000 + 1.5 * plain


def test_a_barrier_costs_latency_and_joins_all_ranks() -> None:
    assert max(end_ns(cluster(3, latency_us=10), ring_all_reduce, 0)) == 4 * 10_000


@pytest.mark.parametrize("program", RINGS)
def test_one_rank_is_done_at_once(program: ProgramOf) -> None:
    assert end_ns(cluster(1), program, 1000) == [0]


def test_gloo_s_reduce_scatter_moves_as_much_as_an_all_reduce() -> None:
    ends = {kind: end_ns(cluster(4), program_of(NATIVE, kind), 4_000_000) for kind in KINDS}
    assert ends[REDUCE_SCATTER] == ends[ALL_REDUCE]
    assert ends[ALL_GATHER] == end_ns(cluster(4), ring_all_gather, 4_000_000)
