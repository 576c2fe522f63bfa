from __future__ import annotations

import numpy as np
import pytest

from headway.cluster import Cluster, Host
from headway.collectives.program import ring_all_reduce, ring_reduce_scatter
from headway.network.collective_costs import fit_cost, ideal_seconds


def test_overhead_and_factor_are_recovered() -> None:
    ideal = np.array([1e-4, 1e-3, 1e-2, 1e-1])
    overhead_s, factor = fit_cost(0.002 + 1.25 * ideal, ideal)
    assert overhead_s == pytest.approx(0.002, rel=0.05)
    assert factor == pytest.approx(1.25, rel=0.05)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_ideal_of_a_ring_is_its_volume_over_the_rate(world_size: int) -> None:
    hosts = tuple(Host(name=f"h{i}", workers=1, up_gbps=1, down_gbps=1) for i in range(world_size))
    cluster = Cluster(hosts=hosts, latency_us=0)
    size_bytes = 12_000_000
    one_way_s = size_bytes * 8 * (world_size - 1) / world_size / 1e9
    assert ideal_seconds(cluster, ring_reduce_scatter, size_bytes) == pytest.approx(one_way_s, rel=1e-6)
    assert ideal_seconds(cluster, ring_all_reduce, size_bytes) == pytest.approx(2 * one_way_s, rel=1e-6)
