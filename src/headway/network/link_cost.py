"""Tabulates the cost of collectives on a cluster: simulated once, then looked up."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headway.cluster import Cluster
from headway.collectives.algorithms import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, RING
from headway.collectives.dataflow import alone
from headway.collectives.hierarchical import Hosts
from headway.collectives.resources import ClusterResources
from headway.collectives.selection import RINGS, AlgorithmName, Algorithms, Selection, native
from headway.simulation.building import OperationGraph
from headway.simulation.engine import play

_SIZES_BYTES = tuple(2**exponent for exponent in range(10, 32, 3))


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """The simulated cost of one collective over all ranks of a cluster.

    Alone, a collective of ``sizes_bytes[i]`` takes ``alone_ns[i]``: ``overhead_ns``, then ``messages`` rounds, each of
    which occupies the slowest link and then waits for the message to arrive. ``ns_per_byte`` is the time on that link per
    byte of the tensor.
    """

    overhead_ns: float
    ns_per_byte: float
    messages: int
    sizes_bytes: tuple[int, ...]
    alone_ns: tuple[float, ...]

    def time_ns(self, size_bytes: float) -> float:
        """The time of a collective of ``size_bytes`` alone, interpolated between the simulated sizes."""
        index = min(max(1, bisect_right(self.sizes_bytes, size_bytes)), len(self.sizes_bytes) - 1)
        x0, x1 = self.sizes_bytes[index - 1 : index + 1]
        y0, y1 = self.alone_ns[index - 1 : index + 1]
        return y0 + (y1 - y0) * (size_bytes - x0) / (x1 - x0)

    @property
    def alpha_ns(self) -> float:
        """The cost of a collective besides its bytes."""
        return max(0.0, self.alone_ns[-1] - self.ns_per_byte * self.sizes_bytes[-1])


@dataclass(frozen=True, slots=True)
class HalfCost:
    """The cost of a half whose algorithm may depend on the size: for large tensors, and for ``smaller`` size limits."""

    large: CollectiveCost
    smaller: tuple[tuple[int, CollectiveCost], ...] = ()

    def at(self, size_bytes: float) -> CollectiveCost:
        """The cost with the algorithm for ``size_bytes``."""
        return next((cost for most_bytes, cost in self.smaller if size_bytes <= most_bytes), self.large)

    def time_ns(self, size_bytes: float) -> float:
        """The time of a collective of ``size_bytes`` alone."""
        return self.at(size_bytes).time_ns(size_bytes)


@dataclass(frozen=True, slots=True)
class LinkCost:
    """The costs of both halves of an all-reduce over ``world_size`` ranks."""

    world_size: int
    reduce_scatter: HalfCost
    all_gather: HalfCost


class LinkCosts:
    """Computes the costs of halves on one cluster, each algorithm once."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._measured_costs: dict[tuple[AlgorithmName, str, tuple[int, ...]], CollectiveCost] = {}

    def of(self, algorithms: Algorithms = RINGS) -> LinkCost:
        """The costs of both halves with ``algorithms``."""
        return LinkCost(
            self.cluster.world_size,
            self._half(algorithms, REDUCE_SCATTER),
            self._half(algorithms, ALL_GATHER),
        )

    def _half(self, algorithms: Algorithms, kind: str) -> HalfCost:
        sizes_bytes = [size_class.size_bytes for size_class in algorithms.by_size]
        order = algorithms.ring_order
        smaller = tuple((size, self.of_half(algorithms.of(kind, size), kind, order)) for size in sizes_bytes)
        return HalfCost(self.of_half(algorithms.of(kind, math.inf), kind, order), smaller)

    def of_half(
        self, algorithm: AlgorithmName, kind: str, ring_order: tuple[int, ...] = ()
    ) -> CollectiveCost:
        """The cost of the half ``kind`` with one algorithm for all sizes."""
        key = algorithm, kind, ring_order if algorithm == RING else ()
        if key not in self._measured_costs:
            alike = Algorithms(algorithm, algorithm, ring_order=key[2])
            self._measured_costs[key] = _measure(self.cluster, alike, kind)
        return self._measured_costs[key]


def all_reduce_cost(cluster: Cluster) -> CollectiveCost:
    """The cost of the process group's own all-reduce on ``cluster``."""
    return _measured(
        cluster, lambda size_bytes: native(ALL_REDUCE, size_bytes, cluster.world_size, cluster.library)
    )


def _measure(cluster: Cluster, algorithms: Algorithms, kind: str) -> CollectiveCost:
    return _measured(
        cluster, lambda size_bytes: algorithms.select(kind, size_bytes, cluster.world_size, cluster.library)
    )


def _measured(cluster: Cluster, selected: Callable[[int], Selection]) -> CollectiveCost:
    hosts = Hosts.of_cluster(cluster)
    least = selected(1).on(hosts)
    resources = ClusterResources(cluster)
    alone_ns: list[float] = []
    ns_per_byte = 0.0
    for size_bytes in _SIZES_BYTES:
        selection = selected(size_bytes).on(hosts)
        if selection.is_timed_by_nccl(cluster):
            _, lasts_ns = resources.nccl(selection.kind, size_bytes, selection.cost(cluster), 0)
            alone_ns.append(float(lasts_ns))
            ns_per_byte = lasts_ns / size_bytes
            continue
        graph = alone(cluster, selection.program_of, size_bytes, selection.cost(cluster))
        alone_ns.append(float(play(graph).end_ns.max()))
        if selection == least:  # the bytes of larger ones, in pieces, may have another factor
            ns_per_byte = _busiest_ns(graph) / size_bytes
    messages = len(least.program_of(0, cluster.world_size).steps)
    overhead_ns = least.cost(cluster).overhead_us * 1e3
    return CollectiveCost(overhead_ns, ns_per_byte, messages, _SIZES_BYTES, tuple(alone_ns))


def _busiest_ns(graph: OperationGraph) -> float:
    """The busy time of the busiest link, in ns."""
    busiest = 0.0
    for side in (graph.sender, graph.receiver):
        used = side >= 0
        if used.any():
            busy_ns = np.bincount(side[used], weights=graph.duration_ns[used])
            busiest = max(busiest, float(busy_ns.max()))
    return busiest
