"""Hierarchical collectives, held against plain sums in one process, and against the rings that they replace."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collectives.interpreter import interpret
from tests.collectives.on_clusters import cluster_of, time_ms

from headway.cluster import AlgorithmCost
from headway.collectives.algorithms import (
    ALL_GATHER,
    ALL_REDUCE,
    HIERARCHICAL,
    KINDS,
    REDUCE_SCATTER,
    RING,
    sent_bytes,
)
from headway.collectives.algorithms import program_of as named
from headway.collectives.hierarchical import (
    Hosts,
    hierarchical_all_gather,
    hierarchical_all_reduce,
    hierarchical_reduce_scatter,
)
from headway.collectives.program import chunk_bounds, owned_chunk, scratch_numel, scratch_numel_of
from headway.collectives.selection import Algorithms, Selection
from headway.errors import PlanError

MIB = 2**20


@st.composite
def hosts_of(draw: st.DrawFn) -> Hosts:
    """Up to 16 ranks, equally many on every host, in any order."""
    workers = draw(st.integers(1, 4))
    places = [host for host in range(draw(st.integers(1, 4))) for _ in range(workers)]
    return Hosts.of_places(draw(st.permutations(places)) if draw(st.booleans()) else places)


@settings(deadline=None)
@given(hosts=hosts_of(), pieces=st.integers(1, 3), numel=st.integers(0, 150), seed=st.integers(0, 2**32))
def test_they_sum_like_one_process_however_they_interleave(
    hosts: Hosts, pieces: int, numel: int, seed: int
) -> None:
    ranks = range(sum(map(len, hosts.ranks)))
    world_size = len(ranks)
    generator = np.random.default_rng(seed)
    tensors = [generator.integers(-1000, 1000, numel) for _ in ranks]
    total = np.sum(tensors, axis=0)

    scatter, gather, both = (
        partial(each, world_size=world_size, pieces=pieces, hosts=hosts)
        for each in (hierarchical_reduce_scatter, hierarchical_all_gather, hierarchical_all_reduce)
    )
    scattered = interpret([scatter(rank) for rank in ranks], tensors, seed)
    for rank, result in enumerate(scattered):
        own = slice(*chunk_bounds(numel, world_size)[owned_chunk(rank, world_size)])
        assert (result[own] == total[own]).all()
    gathered = interpret([gather(rank) for rank in ranks], scattered, seed)
    assert all((result == total).all() for result in gathered)
    reduced = interpret([both(rank) for rank in ranks], tensors, seed)
    assert all((result == total).all() for result in reduced)


@given(hosts=hosts_of(), kind=st.sampled_from(KINDS), pieces=st.integers(1, 3))
def test_only_rounds_across_hosts_leave_one_and_a_ring_has_no_fewer_messages(
    hosts: Hosts, kind: str, pieces: int
) -> None:
    count, workers = len(hosts.ranks), len(hosts.ranks[0])
    host_of = {rank: number for number, ranks in enumerate(hosts.ranks) for rank in ranks}
    rounds = (count - 1) * pieces * (2 if kind == ALL_REDUCE else 1)
    for rank in range(count * workers):
        program = named(HIERARCHICAL, kind, pieces, hosts)(rank, count * workers)
        assert len(program.steps) == len(named(RING, kind, pieces)(rank, count * workers).steps)
        crossing = Counter(host_of[step.send_to] == host_of[rank] for step in program.steps)
        assert crossing[False] == rounds
        after = [step.send_after for step in program.steps]
        assert after == sorted(after)


@given(hosts=hosts_of(), kind=st.sampled_from(KINDS), pieces=st.integers(1, 3), numel=st.integers(0, 200))
def test_scratch_of_rings_is_enough(hosts: Hosts, kind: str, pieces: int, numel: int) -> None:
    world_size = sum(map(len, hosts.ranks))
    program = named(HIERARCHICAL, kind, pieces, hosts)(0, world_size)
    assert scratch_numel_of(program, numel) <= scratch_numel(numel, world_size, pieces)


@pytest.mark.parametrize("places", ["a", "aaaa", "abcd"])
@pytest.mark.parametrize("kind", KINDS)
def test_on_one_host_and_with_one_worker_on_each_they_are_rings(places: str, kind: str) -> None:
    hosts = Hosts.of_places(places)
    for rank in range(len(places)):
        made = named(HIERARCHICAL, kind, 2, hosts)(rank, len(places))
        assert made.steps == named(RING, kind, 2)(rank, len(places)).steps


def test_hosts_with_different_numbers_of_workers_are_refused() -> None:
    hosts = Hosts.of_places("aab")
    with pytest.raises(PlanError, match=r"same number of workers.*1, 2 workers"):
        hierarchical_reduce_scatter(0, 3, hosts=hosts)
    with pytest.raises(PlanError, match="same number of workers"):
        Algorithms(HIERARCHICAL).select(REDUCE_SCATTER, MIB, 3).on(hosts)
    ring = Algorithms(all_gather=HIERARCHICAL).select(REDUCE_SCATTER, MIB, 3)
    assert ring.on(hosts) == Selection(RING, REDUCE_SCATTER)


@pytest.mark.parametrize("kind", [REDUCE_SCATTER, ALL_GATHER])
def test_links_carry_less_and_fewer_rounds_wait_for_each_other(kind: str) -> None:
    """Four hosts of four: 3/4 of a tensor over each link rather than 15/16, and what crosses memory besides."""
    cluster = cluster_of(4, 4)
    ring = Selection(RING, kind)
    ours = Selection(HIERARCHICAL, kind).on(Hosts.of_cluster(cluster))
    large = 64 * MIB
    link_ms, memory_ms = (large * 8 / gbps / 1e6 * 3 / 4 for gbps in (1, 20))
    assert time_ms(cluster, ring, large) > large * 8 / 1e6 * 15 / 16
    assert link_ms < time_ms(cluster, ours, large) < link_ms + memory_ms + 0.5
    assert time_ms(cluster, ours, 1000) < 0.7 * time_ms(cluster, ring, 1000)


def test_memory_as_slow_as_the_links_makes_them_slower() -> None:
    """A ring uses both at once, and these one after the other."""
    cluster = cluster_of(4, 4, local_gbps=1)
    ours = Selection(HIERARCHICAL, ALL_GATHER).on(Hosts.of_cluster(cluster))
    assert time_ms(cluster, ours, 64 * MIB) > time_ms(cluster, Selection(RING, ALL_GATHER), 64 * MIB)


@pytest.mark.parametrize("kind", [REDUCE_SCATTER, ALL_GATHER])
def test_a_host_sends_to_others_what_they_lack(kind: str) -> None:
    for places, sent in (("aabb", 500), ("abab", 500), ("aabbccdd", 750), ("abcd", 750), ("aaaa", 750)):
        assert sent_bytes(HIERARCHICAL, kind, len(places), 1000, Hosts.of_places(places)) == sent


def test_what_nobody_measured_costs_what_rings_do() -> None:
    ring, own = AlgorithmCost(overhead_us=5), AlgorithmCost(overhead_us=7)
    selection = Selection(HIERARCHICAL, ALL_GATHER, 2)
    cluster = cluster_of(2, 2).model_copy(update={"algorithms": {"ring": ring}})
    assert selection.cost(cluster) == ring
    measured = cluster.model_copy(update={"algorithms": {"ring_2": ring, "hierarchical": own}})
    assert selection.cost(measured) == own
