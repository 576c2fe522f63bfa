"""What the tuner makes of the collectives that it times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.planning.jobs import cluster_of

from headway.cluster import Cluster
from headway.collectives.hierarchical import Hosts
from headway.network.link_cost import LinkCosts
from headway.strategies.decoupled.links import saved_bytes, with_link_rates
from headway.strategies.live.channels.communication import Job

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


class Unequal:
    """Ranks on links of such rates (bytes/s), as the tuner's transport and as its agreement."""

    def __init__(self, up: list[float], down: list[float], workers_a_host: int = 1) -> None:
        self.world_size = len(up)
        self.hosts = Hosts.of_places([rank // workers_a_host for rank in range(len(up))])
        self._up, self._down = up, down
        self.strides: list[int] = []
        self._took_s: list[float] = []

    def meet(self) -> None: ...

    def submit(self, job: Job) -> Job:
        job.work(0)
        return job

    def wait(self, job: Job) -> None: ...

    def exchange(self, outgoing: torch.Tensor, incoming: torch.Tensor, stride: int, channel: int) -> float:
        assert outgoing.shape == incoming.shape
        self.strides.append(stride)
        self._took_s = [
            outgoing.numel() / min(self._up[rank - stride], self._down[rank])
            for rank in range(self.world_size)
        ]
        return self._took_s[0]

    def from_each(self, values: list[float]) -> list[list[float]]:
        return [[each] * len(values) for each in self._took_s]


def measured_on(links: Unequal) -> Cluster:
    cluster = cluster_of(links.world_size, gbps=0.08, workers_a_host=1, latency_us=100.0, overhead_us=1000.0)
    ranks: Any = links
    return with_link_rates(cluster, ranks, ranks)


def test_each_link_gets_its_own_rate_where_they_are_unequal() -> None:
    up, down = [1e7, 1e7, 4e6, 1e7], [1e7, 8e6, 1e7, 2e7]
    found = measured_on(Unequal(up, down))
    # The slowest has what a ring gets, the others in proportion; no link is seen to carry more than its peers send.
    assert [host.up_gbps for host in found.hosts] == pytest.approx([0.2, 0.2, 0.08, 0.2])
    assert [host.down_gbps for host in found.hosts] == pytest.approx([0.2, 0.16, 0.2, 0.2])


def test_links_that_are_about_equal_stay_as_a_ring_sees_them() -> None:
    links = Unequal([1e7, 0.95e7, 1e7], [1e7] * 3)
    assert {host.up_gbps for host in measured_on(links).hosts} == {0.08}
    assert set(links.strides) == {1}
    assert {host.up_gbps for host in measured_on(Unequal([1e7, 0.85e7, 1e7], [1e7] * 3)).hosts} == {0.08}


@pytest.mark.parametrize("links", [Unequal([1e7, 1e6], [1e7, 1e6]), Unequal([1e7] * 3 + [1e6], [1e7] * 4, 2)])
def test_two_ranks_and_several_on_a_host_are_not_measured(links: Unequal) -> None:
    measured_on(links)
    assert links.strides == []
