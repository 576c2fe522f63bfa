"""Algorithms of fewer rounds than a ring: what they gain for small tensors, and lose where workers share a link."""

from __future__ import annotations

import pytest
from tests.collectives.on_clusters import cluster_of, time_us

from headway.collectives.algorithms import (
    ALL_GATHER,
    DIRECT,
    HALVING_DOUBLING,
    REDUCE_SCATTER,
    RING,
    TREE,
    sent_bytes,
)
from headway.collectives.hierarchical import Hosts

LARGE_BYTES = 64 * 2**20


@pytest.mark.parametrize("kind", [REDUCE_SCATTER, ALL_GATHER])
@pytest.mark.parametrize(
    ("algorithm", "ranks", "rounds"),
    [(DIRECT, 8, 1), (HALVING_DOUBLING, 8, 3), (RING, 8, 7), (TREE, 6, 3), (TREE, 12, 4), (RING, 12, 11)],
)
def test_a_small_tensor_takes_a_latency_a_round_and_a_large_one_as_long_as_in_a_ring(
    algorithm: str, ranks: int, rounds: int, kind: str
) -> None:
    cluster = cluster_of(ranks)
    assert time_us(cluster, algorithm, kind, 10 * ranks) == pytest.approx(100 * rounds, rel=0.02)
    ring_us = time_us(cluster, RING, kind, LARGE_BYTES)
    assert time_us(cluster, algorithm, kind, LARGE_BYTES) == pytest.approx(ring_us, rel=0.01)


@pytest.mark.parametrize("kind", [REDUCE_SCATTER, ALL_GATHER])
@pytest.mark.parametrize("algorithm", [DIRECT, HALVING_DOUBLING])
def test_with_several_workers_a_host_links_carry_several_times_what_they_do_in_a_ring(
    algorithm: str, kind: str
) -> None:
    cluster = cluster_of(4, workers=4)
    times = time_us(cluster, algorithm, kind, LARGE_BYTES) / time_us(cluster, RING, kind, LARGE_BYTES)
    assert times == pytest.approx(4 * 12 / 15, rel=0.05)
    sent = [sent_bytes(name, kind, 16, 1600, Hosts.of_cluster(cluster)) for name in (algorithm, RING)]
    assert sent == [4 * 12 * 100, 15 * 100]
