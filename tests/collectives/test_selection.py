from __future__ import annotations

import pytest

from headway.cluster import AlgorithmCost, Cluster, Host
from headway.collectives.algorithms import (
    ALL_GATHER,
    ALL_REDUCE,
    DIRECT,
    HIERARCHICAL,
    KINDS,
    NATIVE,
    NCCL,
    REDUCE_SCATTER,
    RING,
    sent_bytes,
)
from headway.collectives.hierarchical import Hosts
from headway.collectives.selection import RINGS, Algorithms, Selection, SizeClass, native
from headway.errors import PlanError

MIB = 2**20


def cluster(**costs: float) -> Cluster:
    hosts = tuple(Host(name=f"h{index}", workers=1, up_gbps=1, down_gbps=1) for index in range(4))
    return Cluster(
        hosts=hosts, algorithms={name: AlgorithmCost(overhead_us=us) for name, us in costs.items()}
    )


def test_chunks_of_two_mebibytes_and_more_are_cut_into_two_pieces() -> None:
    assert RINGS.select(REDUCE_SCATTER, 8 * MIB - 4, 4) == Selection(RING, REDUCE_SCATTER, 1)
    assert RINGS.select(REDUCE_SCATTER, 8 * MIB, 4) == Selection(RING, REDUCE_SCATTER, 2)
    assert RINGS.select(ALL_GATHER, 8 * MIB, 8).pieces == 1
    assert len(RINGS.select(ALL_GATHER, 8 * MIB, 4).program_of(0, 4).steps) == 2 * 3


def test_nccl_has_rings_of_its_own_for_everything() -> None:
    """Each half moves what a ring half does, in pieces of a step of NCCL's buffers."""
    for algorithms in (RINGS, Algorithms(reduce_scatter="native", all_gather="native")):
        selection = algorithms.select(REDUCE_SCATTER, 8 * MIB, 4, "nccl")
        assert selection == native(REDUCE_SCATTER, 8 * MIB, 4, "nccl") == Selection(NCCL, REDUCE_SCATTER, 4)
        assert len(selection.program_of(0, 4).steps) == 3 * 4
    assert native(ALL_REDUCE, 1, 4, "nccl").pieces == 1
    assert native(ALL_REDUCE, 2**40, 4, "nccl").pieces == 64
    for kind, rounds in ((ALL_REDUCE, 6), (REDUCE_SCATTER, 3), (ALL_GATHER, 3)):
        assert sent_bytes(NCCL, kind, 4, 4_000) == rounds * 1_000
    assert native(ALL_REDUCE, 1, 4, "nccl").cost(cluster(gloo_all_reduce=7)).overhead_us == 7


def test_each_half_has_its_own_algorithm_and_native_ones_are_cut_as_gloo_cuts_them() -> None:
    mixed = Algorithms(all_gather="native")
    assert mixed.select(REDUCE_SCATTER, 64 * MIB, 2) == Selection(RING, REDUCE_SCATTER, 2)
    gather = mixed.select(ALL_GATHER, 64 * MIB, 2)
    assert (gather.algorithm, gather.kind) == (NATIVE, ALL_GATHER)
    assert len(gather.program_of(0, 4).steps) == 2 * 3
    for size_bytes, segments in ((1, 2), (8 * MIB, 2), (8 * MIB + 1, 3), (64 * MIB, 16)):
        assert native(ALL_REDUCE, size_bytes, 4).pieces == segments


def test_a_ring_in_pieces_costs_what_was_measured_of_it_or_else_what_whole_chunks_cost() -> None:
    in_pieces = Selection(RING, ALL_GATHER, 2)
    assert in_pieces.cost(cluster(ring=5, ring_2=7)).overhead_us == 7
    assert in_pieces.cost(cluster(ring=5)).overhead_us == 5
    assert in_pieces.cost(cluster(native_all_gather=5)) == AlgorithmCost()
    assert Selection(NATIVE, ALL_REDUCE).cost(cluster(gloo_all_reduce=9)).overhead_us == 9


@pytest.mark.parametrize("world_size", [2, 5])
def test_bytes_sent_are_those_of_the_programs(world_size: int) -> None:
    share = (world_size - 1) / world_size
    sent = {
        (algorithm, kind): sent_bytes(algorithm, kind, world_size, 1000) / share / 1000
        for algorithm in (RING, NATIVE)
        for kind in KINDS
    }
    assert sent == pytest.approx({
        (RING, ALL_REDUCE): 2, (RING, REDUCE_SCATTER): 1, (RING, ALL_GATHER): 1,
        (NATIVE, ALL_REDUCE): 2, (NATIVE, REDUCE_SCATTER): 2, (NATIVE, ALL_GATHER): 1,
    })  # fmt: skip


def test_a_native_half_that_nobody_measured_costs_what_a_native_all_reduce_does() -> None:
    assert Selection(NATIVE, ALL_GATHER).cost(cluster(gloo_all_reduce=9)).overhead_us == 9
    assert (
        Selection(NATIVE, ALL_GATHER).cost(cluster(gloo_all_reduce=9, native_all_gather=4)).overhead_us == 4
    )


SMALL = SizeClass(size_bytes=1000, reduce_scatter="direct", all_gather="native")
MIDDLE = SizeClass(size_bytes=5000, reduce_scatter="direct", all_gather="ring")


def test_a_bucket_has_the_algorithms_of_the_first_class_that_is_as_large() -> None:
    mixed = Algorithms("hierarchical", "ring", (SMALL, MIDDLE))
    for size_bytes, scatter, gather in (
        (1, DIRECT, NATIVE),
        (1000, DIRECT, NATIVE),
        (1001, DIRECT, RING),
        (5000, DIRECT, RING),
        (5001, HIERARCHICAL, RING),
    ):
        assert mixed.select(REDUCE_SCATTER, size_bytes, 4).algorithm == scatter
        assert mixed.select(ALL_GATHER, size_bytes, 4).algorithm == gather
    assert mixed.names(REDUCE_SCATTER) == [DIRECT, HIERARCHICAL]
    assert mixed.names(ALL_GATHER) == [NATIVE, RING]
    assert mixed.in_words == [
        "hierarchical reduce-scatter",
        "direct reduce-scatter up to 1,000 bytes",
        "native all-gather up to 1,000 bytes",
        "direct reduce-scatter up to 5,000 bytes",
        "ring all-gather up to 5,000 bytes",
    ]
    assert RINGS.in_words == []


def test_no_class_may_ask_for_what_hosts_cannot_do() -> None:
    halving = SizeClass(size_bytes=1000, reduce_scatter="ring", all_gather="halving_doubling")
    Algorithms(by_size=(halving,)).check(Hosts.of_places("abcd"))
    with pytest.raises(PlanError, match="a power of two"):
        Algorithms(by_size=(halving,)).check(Hosts.of_places("abc"))
