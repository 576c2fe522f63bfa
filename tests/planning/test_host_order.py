"""Orders of hosts for stages and replicas: near the best, and the order as it is where nothing is gained."""

from __future__ import annotations

import random
from itertools import pairwise, permutations

import numpy as np
import pytest

from headway.cluster import Cluster, Host, SlowPath
from headway.strategies.pipeline import host_order
from headway.strategies.pipeline.host_order import StageDemand, by_speed, order_for


def a_cluster(draw: random.Random, count: int, workers: int = 1) -> Cluster:
    hosts = tuple(Host(name=f"h{i}", workers=workers, up_gbps=10, down_gbps=10) for i in range(count))
    paths = tuple(
        SlowPath(source=one.name, target=other.name, gbps=draw.choice([0.5, 1, 3, 8]))
        for one in hosts
        for other in hosts
        if one is not other and draw.random() < 0.8
    )
    return Cluster(hosts=hosts, paths=paths)


def test_a_search_comes_near_the_best_of_all_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, ratios = random.Random(7), []
    pipelines = ((0, 1, 2), (3, 4, 5))
    demand = StageDemand(1e6, 1e6, 1e7, 6)
    for _ in range(4):
        cluster = a_cluster(draw, 6)
        exact = order_for(cluster, pipelines, demand)
        with monkeypatch.context() as patch:
            patch.setattr(host_order, "MOST_TRIED", 0)
            near = order_for(cluster, pipelines, demand)
        costs = host_order._StepCosts(cluster, pipelines, demand)
        assert costs(exact) == min(map(costs, permutations(range(6))))
        ratios.append(costs(near) / costs(exact))
    assert max(ratios) < 1.1
    assert sorted(ratios)[2] < 1.02


def test_hosts_that_are_alike_stay() -> None:
    hosts = tuple(Host(name=f"h{i}", workers=2, up_gbps=10, down_gbps=10) for i in range(4))
    assert order_for(Cluster(hosts=hosts), ((0, 1),), StageDemand(1, 1, 1, 1)) == (0, 1, 2, 3)


def test_sites_within_regions_stand_together() -> None:
    """Two regions of two sites of three hosts, in an order by chance."""
    place = list(range(12))
    random.Random(3).shuffle(place)
    apart = np.array([[1 + 9 * (a // 3 != b // 3) + 90 * (a // 6 != b // 6) for b in place] for a in place])
    order = [place[host] for host in by_speed(apart.astype(float))]
    assert sum(a // 3 != b // 3 for a, b in pairwise(order)) == 3
    assert sum(a // 6 != b // 6 for a, b in pairwise(order)) == 1
