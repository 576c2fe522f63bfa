"""Finds an order of ranks for rings that avoids slow paths between hosts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

from headway.cluster import Cluster, Ways
from headway.collectives.hierarchical import Hosts
from headway.time_limit import time_is_up

Order = tuple[int, ...]
Cost = Callable[[Order], tuple[float, float]]

MOST_TRIED_HOSTS = 8
"""Up to this many hosts, every order is tried."""
MOST_THOROUGH_HOSTS = 64
"""With more hosts, each segment is reversed at most once."""
MOST_HOSTS = 256
"""With more hosts, the order stays as it is: a search would take minutes."""


def ring_order_on(cluster: Cluster) -> Order:
    """The order of ranks that maximizes the slowest path between neighbours; empty if rank order is best.

    Every path of a ring carries equally much, so the slowest decides; ties are broken by the mean. Without slow paths,
    all orders are equal. Ranks of a host stay together.
    """
    hosts = len(cluster.hosts)
    if not cluster.paths or not 3 <= hosts <= MOST_HOSTS:
        return ()
    costs = _costs(cluster)

    def cost(order: Order) -> tuple[float, float]:
        ways = [costs[host][next_host] for host, next_host in zip(order, (*order[1:], order[0]), strict=True)]
        return max(ways), sum(ways)

    declared_order = tuple(range(hosts))
    best = (
        _best_of_all(declared_order, cost) if hosts <= MOST_TRIED_HOSTS else _improved(declared_order, cost)
    )
    if cost(best)[0] >= cost(declared_order)[0]:
        return ()
    ranks = Hosts.of_cluster(cluster).ranks
    return tuple(rank for host in best for rank in ranks[host])


def _best_of_all(start_order: Order, cost: Cost) -> Order:
    first, *remaining = start_order
    return min(((first, *order) for order in permutations(remaining)), key=cost)


def _improved(order: Order, cost: Cost) -> Order:
    """Reverse segments while that gains (2-opt, Croes, 1958) and there is time."""
    best, least, improved = order, cost(order), True
    while improved:
        improved = False
        for start in range(1, len(best) - 1):
            if time_is_up():
                return best
            for end in range(start + 1, len(best)):
                turned = (*best[:start], *reversed(best[start : end + 1]), *best[end + 1 :])
                if (turned_cost := cost(turned)) < least:
                    best, least, improved = turned, turned_cost, True
        improved = improved and len(best) <= MOST_THOROUGH_HOSTS
    return best


def _costs(cluster: Cluster) -> list[list[float]]:
    """The time per bit from each host to each other host."""
    ways, places = Ways(cluster), range(len(cluster.hosts))
    return [
        [0.0 if source == target else 1 / ways.gbps(source, target) for target in places] for source in places
    ]
