from __future__ import annotations

import pytest

from headway.cluster import AlgorithmCost, Cluster, Host
from headway.collectives.dataflow import repeated
from headway.collectives.program import ring_all_reduce, ring_reduce_scatter
from headway.collectives.servers import push_and_pull
from headway.network.collective_costs import (
    Measured,
    as_fast_as_seen,
    fit_cost,
    replayed_seconds,
    seconds_alone,
)
from headway.simulation.engine import play

SIZES_BYTES = (4096, 65_536, 262_144, 1_048_576, 4_194_304)


def cluster_of(world_size: int, gbps: float = 1.0, **options: float | int) -> Cluster:
    hosts = tuple(Host(name=f"h{i}", workers=1, up_gbps=gbps, down_gbps=gbps) for i in range(world_size))
    return Cluster.model_validate({"hosts": hosts, **options})


@pytest.mark.parametrize("burst_bytes", [0, 72_000])
@pytest.mark.parametrize("message_us", [0.0, 450.0])
def test_the_cost_of_messages_and_bytes_is_recovered(message_us: float, burst_bytes: int) -> None:
    cluster = cluster_of(4, 0.25, burst_bytes=burst_bytes)
    true = AlgorithmCost(message_us=message_us, message_cpu_us=min(message_us, 200.0), byte_factor=1.25)
    programs = [ring_all_reduce]
    measured = [
        Measured(size, replayed_seconds(cluster, programs, size, true), 6 * 200e-6) for size in SIZES_BYTES
    ]
    found = fit_cost(cluster, programs, measured)
    assert found.message_us == pytest.approx(message_us, rel=0.02, abs=60)  # a tiny message has bytes as well
    assert found.byte_factor == pytest.approx(1.25, rel=0.02)
    assert found.fit_error < 0.02
    assert found.message_cpu_us <= found.message_us


def test_what_one_size_takes_longer_is_laid_to_messages_of_that_size() -> None:
    cluster = cluster_of(4)
    factors = (1, 1.5, 1.4, 1.6, 1)
    measured = [
        Measured(size, replayed_seconds(cluster, [ring_all_reduce], size, AlgorithmCost()) * factor)
        for size, factor in zip(SIZES_BYTES, factors, strict=True)
    ]
    found = fit_cost(cluster, [ring_all_reduce], measured)
    assert found.byte_factor == pytest.approx(1, rel=0.01)
    assert [each.size_bytes for each in found.by_size] == [size // 4 for size in SIZES_BYTES]
    for each in measured:
        replayed_s = replayed_seconds(cluster, [ring_all_reduce], each.size_bytes, found)
        assert replayed_s == pytest.approx(each.seconds, rel=0.01)


def test_no_bytes_are_quicker_than_links() -> None:
    """Large messages cost less than tiny ones here: bytes would seem to take a tenth less than they do."""
    cluster = cluster_of(4)
    dear, cheap = AlgorithmCost(message_us=900), AlgorithmCost(message_us=100)
    measured = [
        Measured(size_bytes, replayed_seconds(cluster, [push_and_pull], size_bytes, cost))
        for size_bytes, cost in ((4000, dear), (300_000, cheap), (1_200_000, cheap))
    ]
    found = fit_cost(cluster, [push_and_pull], measured)
    assert found.byte_factor == 1
    slow = Host(name="slow", workers=1, up_gbps=0.5, down_gbps=0.5)
    half = cluster.model_copy(update={"hosts": (slow, *cluster.hosts[1:])})
    for size_bytes in (300_000, 1_200_000):
        expected = replayed_seconds(half, [push_and_pull], size_bytes, cheap)
        assert replayed_seconds(half, [push_and_pull], size_bytes, found) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("world_size", [2, 4])
def test_links_that_were_measured_too_slow_are_as_quick_as_rings_show(world_size: int) -> None:
    """Goodput that something disturbed, and rings that were timed when it was over."""
    true = cluster_of(world_size, 0.25)
    cost = AlgorithmCost(message_us=400)
    programs = [ring_reduce_scatter]
    seen = [Measured(size, replayed_seconds(true, programs, size, cost)) for size in (1000, *SIZES_BYTES)]
    slow = cluster_of(world_size, 0.2)
    found = as_fast_as_seen(slow, [(programs, seen)])
    assert found.hosts[0].up_gbps == pytest.approx(0.25, rel=0.02)
    assert as_fast_as_seen(cluster_of(world_size, 0.3), [(programs, seen)]).hosts[0].up_gbps == 0.3
    together = Cluster(hosts=(Host(name="h", workers=world_size, up_gbps=9, down_gbps=9),), local_gbps=0.2)
    assert as_fast_as_seen(together, [(programs, seen)]).local_gbps > 0.2
    assert as_fast_as_seen(slow, []) is slow


def test_measurements_that_vary_show_in_the_error() -> None:
    cluster = cluster_of(4)
    measured = [
        Measured(size, replayed_seconds(cluster, [ring_all_reduce], size, AlgorithmCost()), spread=0.3)
        for size in SIZES_BYTES
    ]
    assert fit_cost(cluster, [ring_all_reduce], measured).fit_error == pytest.approx(0.3)


@pytest.mark.parametrize("turns", [5, 9, 30])
def test_many_collectives_are_not_played_one_by_one(turns: int) -> None:
    cluster = cluster_of(4, 0.25, burst_bytes=72_000)
    cost = AlgorithmCost(message_us=300, message_cpu_us=100)
    all_s = float(play(repeated(cluster, ring_all_reduce, 40_000, cost, turns)).end_ns.max()) / 1e9
    assert replayed_seconds(cluster, [ring_all_reduce], 40_000, cost, turns) == pytest.approx(
        all_s / turns, rel=0.03
    )


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_ideal_of_a_ring_is_its_volume_over_the_rate(world_size: int) -> None:
    cluster = cluster_of(world_size, latency_us=0)
    size_bytes = 12_000_000
    one_way_s = size_bytes * 8 * (world_size - 1) / world_size / 1e9
    assert seconds_alone(cluster, ring_reduce_scatter, size_bytes) == pytest.approx(one_way_s, rel=1e-6)
    assert seconds_alone(cluster, ring_all_reduce, size_bytes) == pytest.approx(2 * one_way_s, rel=1e-6)
