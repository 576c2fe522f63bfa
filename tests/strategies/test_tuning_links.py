"""What the tuner makes of the collectives that it times."""

from __future__ import annotations

import pytest
from tests.planning.jobs import cluster_of

from headway.cluster import Cluster
from headway.planning.link_cost import LinkCosts
from headway.strategies.data_parallel.decoupled.tuning.links import saved_bytes

KIB = 2**10


def on_links_that_save(size_bytes: int) -> Cluster:
    """Eight hosts on slow links, whose rings take as long to start as 40 KiB take."""
    cluster = cluster_of(8, gbps=0.07, workers_a_host=1, latency_us=100.0, overhead_us=4700.0)
    return cluster.model_copy(update={"burst_bytes": size_bytes})


def ring_s(cluster: Cluster, size_bytes: int) -> float:
    return LinkCosts(cluster).of().reduce_scatter.time_ns(size_bytes) / 1e9


@pytest.mark.parametrize("saved", [0, 8 * KIB, 32 * KIB])
def test_what_links_save_up_is_found_from_one_ring(saved: int) -> None:
    took_s = ring_s(on_links_that_save(saved), 64 * KIB)
    found = saved_bytes(on_links_that_save(0), took_s, 64 * KIB)
    assert found == pytest.approx(saved, abs=KIB)
    for size in (16 * KIB, 512 * KIB):  # so rings of other sizes are predicted as well
        taken_s = ring_s(on_links_that_save(found), size)
        assert taken_s == pytest.approx(ring_s(on_links_that_save(saved), size), rel=0.03)


def test_a_ring_that_takes_a_little_less_is_no_burst() -> None:
    took_s = 0.97 * ring_s(on_links_that_save(0), 64 * KIB)
    assert saved_bytes(on_links_that_save(0), took_s, 64 * KIB) == 0


def test_no_more_is_saved_than_was_sent() -> None:
    assert saved_bytes(on_links_that_save(0), 1e-6, 64 * KIB) <= 64 * KIB
