"""Estimates of what the network carries between neighbours, in each direction, from the flights of recent steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headway.cluster import Cluster, Host, SlowPath
from headway.strategies.pipeline.tuning.flights import Flight, Way

SHORTEST_NS = 1e3
LEAST_GBPS, MOST_GBPS = 1e-6, 1e6


class LinkEstimate(NamedTuple):
    """``gbps`` of one direction between two ranks, over so many messages, the last of them in step ``seen``.

    The mean lies within ``uncertainty`` (a share of it) in nineteen of twenty cases, if messages are like each other.
    """

    gbps: float
    uncertainty: float
    messages: int
    seen: int

    def differs_from(self, other: LinkEstimate, share: float) -> bool:
        """Whether another one is farther away than ``share``, and than both uncertainties."""
        apart = abs(math.log(self.gbps / other.gbps))
        return apart > max(math.log1p(share), math.hypot(self.uncertainty, other.uncertainty))


def estimate(flights: Iterable[Flight], latency_ns: float, seen: int) -> dict[Way, LinkEstimate]:
    """What each way carried on average: all bytes over all the time that they took, but for latencies."""
    by_way: dict[Way, list[Flight]] = defaultdict(list)
    for flight in flights:
        by_way[flight.way].append(flight)
    return {way: _estimate(own, latency_ns, seen) for way, own in by_way.items()}


def _estimate(flights: Sequence[Flight], latency_ns: float, seen: int) -> LinkEstimate:
    took_ns = [max(SHORTEST_NS, flight.alone_ns - latency_ns) for flight in flights]
    each = [ns / flight.size_bytes for ns, flight in zip(took_ns, flights, strict=True)]
    mean = sum(took_ns) / sum(flight.size_bytes for flight in flights)
    count = len(flights)
    spread = math.sqrt(sum((one - mean) ** 2 for one in each) / max(1, count - 1)) / mean
    uncertainty = 2 * spread / math.sqrt(count) if count > 1 else 1.0
    return LinkEstimate(min(MOST_GBPS, max(LEAST_GBPS, 8 / mean)), uncertainty, count, seen)


def cluster_of(estimates: dict[Way, LinkEstimate], ranks: int, latency_ns: float) -> Cluster:
    """The network as replay knows it: a host for each rank, with a link as fast as its fastest way, and slower paths.

    What ranks of one host share is in what their messages took.
    """
    up, down = ([0.0] * ranks for _ in range(2))
    for (sender, receiver), found in estimates.items():
        up[sender] = max(up[sender], found.gbps)
        down[receiver] = max(down[receiver], found.gbps)
    fastest = max((found.gbps for found in estimates.values()), default=1.0)
    hosts = tuple(
        Host(name=f"rank{rank}", workers=1, up_gbps=up[rank] or fastest, down_gbps=down[rank] or fastest)
        for rank in range(ranks)
    )
    paths = tuple(
        SlowPath(source=f"rank{sender}", target=f"rank{receiver}", gbps=found.gbps)
        for (sender, receiver), found in sorted(estimates.items())
        if found.gbps < min(up[sender], down[receiver])
    )
    return Cluster(
        hosts=hosts, latency_us=latency_ns / 1e3, paths=paths, source="seen from a pipeline's messages"
    )
