"""Finds an order of ranks for rings that avoids slow paths between hosts."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise, permutations

from headway.cluster import Cluster, Ways
from headway.collectives.algorithms import ALGORITHMS, ALL_GATHER, FOR_HALVES, REDUCE_SCATTER, RING
from headway.collectives.hierarchical import Hosts
from headway.collectives.selection import GLOO, RINGS, AlgorithmName, Algorithms, Selection, SizeClass
from headway.network.link_cost import CollectiveCost, LinkCosts
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


LEAST_SHARE = 1 / 256  # of a model, that buckets are taken to have
LEAST_GAIN = 0.02  # over rings, of an algorithm that replaces them: measurements are no better
STEP_BYTES = 1024
HALVES = (REDUCE_SCATTER, ALL_GATHER)
Limit = tuple[float, AlgorithmName]  # up to how many bytes an algorithm is the fastest


def algorithm_choices(costs: LinkCosts, total_bytes: int) -> list[Algorithms]:
    """The algorithm choices to plan with, for a model of ``total_bytes``; Headway's rings come first.

    If other algorithms are faster for some bucket, adds the fastest one for each size, and, if that depends on the size,
    the one for large buckets for all sizes (with several collectives in flight, the cost of bytes decides). If paths
    between some hosts are slow, variants with a ring order that avoids them come before all of these. Algorithms other
    than rings need measured costs, except hierarchical ones, which need several hosts with equally many workers.
    """
    order = ring_order_on(costs.cluster) if costs.cluster.library == GLOO else ()
    limits = {kind: _fastest(_costs_by_name(costs, kind, order), total_bytes) for kind in HALVES}
    fastest = _by_size(limits[REDUCE_SCATTER], limits[ALL_GATHER])
    alike = Algorithms(fastest.reduce_scatter, fastest.all_gather)
    reordered = [
        replace(choice, ring_order=order) for choice in (RINGS, fastest, alike) if _has_rings(choice)
    ]
    return list(dict.fromkeys((*(reordered if order else ()), RINGS, fastest, alike)))


def _has_rings(algorithms: Algorithms) -> bool:
    return any(RING in algorithms.names(kind) for kind in HALVES)


def _costs_by_name(
    costs: LinkCosts, kind: str, ring_order: tuple[int, ...]
) -> dict[AlgorithmName, CollectiveCost]:
    """The cost of a half by each algorithm available on the cluster."""
    cluster = costs.cluster
    hosts = Hosts.of_cluster(cluster)

    def names() -> Iterator[AlgorithmName]:
        yield RING
        for name in FOR_HALVES if cluster.library == GLOO else ():
            algorithm = ALGORITHMS[name]
            is_measured = Selection(name, kind).cost_names[0] in cluster.algorithms
            if name != RING and algorithm.differs(hosts) and (algorithm.follows_hosts or is_measured):
                yield name

    return {name: costs.of_half(name, kind, ring_order) for name in names()}


def _fastest(costs: Mapping[AlgorithmName, CollectiveCost], total_bytes: int) -> list[Limit]:
    """The fastest algorithm for each range of bucket sizes, as (upper limit, algorithm); the last limit is infinite.

    Between two measured sizes, the switch is where both algorithms take equally long.
    """
    least_bytes = max(1, round(LEAST_SHARE * total_bytes))
    sizes = [size for size in costs[RING].sizes_bytes if least_bytes < size < total_bytes]
    sizes = [least_bytes, *sizes, total_bytes]
    best = [min(costs, key=lambda name: _weighed_ns(costs, name, size)) for size in sizes]
    limits: list[Limit] = []
    for (low, smaller), (high, larger) in pairwise(zip(sizes, best, strict=True)):
        if smaller != larger:
            limits.append((_crossing(costs, smaller, larger, range(low, high, STEP_BYTES)), smaller))
    return [*limits, (math.inf, best[-1])]


def _weighed_ns(
    costs: Mapping[AlgorithmName, CollectiveCost], name: AlgorithmName, size_bytes: float
) -> float:
    return costs[name].time_ns(size_bytes) * (1 if name == RING else 1 + LEAST_GAIN)


def _crossing(
    costs: Mapping[AlgorithmName, CollectiveCost], small: AlgorithmName, large: AlgorithmName, sizes: range
) -> int:
    """The largest of ``sizes`` at which ``small`` is not slower than ``large``; it is not slower at the first."""
    slower = bisect_left(
        sizes, True, key=lambda size: _weighed_ns(costs, small, size) > _weighed_ns(costs, large, size)
    )
    return sizes[max(0, slower - 1)]


def _by_size(scatter: list[Limit], gather: list[Limit]) -> Algorithms:
    """Combine the limits of both halves."""
    sizes = sorted({size for size, _ in (*scatter, *gather)})
    names = [(_of(scatter, size), _of(gather, size)) for size in sizes]
    classes = tuple(
        SizeClass(size_bytes=round(size), reduce_scatter=smaller, all_gather=larger)
        for size, (smaller, larger) in zip(sizes[:-1], names[:-1], strict=True)
    )
    return Algorithms(*names[-1], classes)


def _of(limits: list[Limit], size_bytes: float) -> AlgorithmName:
    return next(name for limit, name in limits if size_bytes <= limit)
