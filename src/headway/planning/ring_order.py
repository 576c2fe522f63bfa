"""In which order ranks should stand in a ring, where the ways between some hosts are slower than their links."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

from headway.cluster import Cluster, Ways
from headway.collectives.hierarchical import Hosts
from headway.time_limit import time_is_up

Order = tuple[int, ...]
Cost = Callable[[Order], tuple[float, float]]

MOST_TRIED_HOSTS = 8
"""Up to so many hosts every order is looked at."""
MOST_THOROUGH_HOSTS = 64
"""For more, each part is turned round once at most."""
MOST_HOSTS = 256
"""For more, the order stays: looking for another would take minutes."""


def ring_order_on(cluster: Cluster) -> Order:
    """The order of ranks in which the slowest way between neighbours is the fastest; none where that is their numbers'.

    In a ring every way carries as much, so that the slowest decides; among equals the mean does. Over links alone all
    orders are equal, as each host sends and receives as much in all of them. Ranks of a host stay together.
    """
    hosts = len(cluster.hosts)
    if not cluster.paths or not 3 <= hosts <= MOST_HOSTS:
        return ()
    costs = _costs(cluster)

    def cost(order: Order) -> tuple[float, float]:
        ways = [costs[one][other] for one, other in zip(order, (*order[1:], order[0]), strict=True)]
        return max(ways), sum(ways)

    known = tuple(range(hosts))
    best = _of_all(known, cost) if hosts <= MOST_TRIED_HOSTS else _improved(known, cost)
    if cost(best)[0] >= cost(known)[0]:
        return ()
    ranks = Hosts.of_cluster(cluster).ranks
    return tuple(rank for host in best for rank in ranks[host])


def _of_all(known: Order, cost: Cost) -> Order:
    first, *others = known
    return min(((first, *order) for order in permutations(others)), key=cost)


def _improved(known: Order, cost: Cost) -> Order:
    """Parts are turned round as long as that gains (2-opt: Croes, 1958), and there is time."""
    best, least, improved = known, cost(known), True
    while improved:
        improved = False
        for start in range(1, len(best) - 1):
            if time_is_up():
                return best
            for end in range(start + 1, len(best)):
                turned = (*best[:start], *reversed(best[start : end + 1]), *best[end + 1 :])
                if (found := cost(turned)) < least:
                    best, least, improved = turned, found, True
        improved = improved and len(best) <= MOST_THOROUGH_HOSTS
    return best


def _costs(cluster: Cluster) -> list[list[float]]:
    """What a bit takes from one host to another."""
    ways, places = Ways(cluster), range(len(cluster.hosts))
    return [
        [0.0 if source == target else 1 / ways.gbps(source, target) for target in places] for source in places
    ]
