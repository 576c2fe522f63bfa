"""What this model's collectives cost, and what they cost its computation, measured in place on its own channels."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from headway.cluster import DEFERRED_UPDATE, AlgorithmCost, Cluster, Host
from headway.collectives.algorithms import (
    ALGORITHMS,
    ALL_GATHER,
    ALL_REDUCE,
    FOR_HALVES,
    REDUCE_SCATTER,
    RING,
    Algorithm,
)
from headway.collectives.hosts import Hosts
from headway.collectives.selection import Selection
from headway.network.collective_costs import seconds_alone
from headway.strategies.adaptive.tuning.agreement import Agreement
from headway.strategies.adaptive.tuning.collective_timer import CollectiveTimer
from headway.strategies.adaptive.tuning.link_rates import with_link_rates
from headway.strategies.decoupled.transport import BucketTransport

TOKENS = 10  # rings of next to nothing in one measurement
LAUNCHES = 25
SMALLS = 4  # small ones in one
SMALL_BYTES = 64 * 2**10
LARGE_BYTES = 4 * 2**20
LONGEST_S = 0.06  # of one ring
TELLING_S, LARGER = (
    0.02,
    4,
)  # from when on a ring tells how long bytes take, and how much larger the next one is
LEAST_BYTE_S = 1e-12
LEAST_LOCAL_GBPS = 20.0
MEASURED_S = (
    0.1  # rings that follow each other without a pause: one would let shaped links save up for a burst
)
BUSY = 0.5  # from this share of CPU time on, rings are timed concurrently with computation, as they run in training
TYPICAL_BUCKETS = 16  # of a planned schedule
STEADY = 0.05  # a difference that says nothing
LEAST_SAVED_BYTES = 512
HALVES = (REDUCE_SCATTER, ALL_GATHER)
RINGS = tuple(Selection(RING, kind) for kind in HALVES)


def measure(
    transport: BucketTransport,
    agreement: Agreement,
    size_bytes: int,
    *,
    busy: float = 0.0,
    update_overhead_ns: float = 0.0,
) -> Cluster:
    """The cluster as a model of ``size_bytes`` sees it: latency, goodput, what rings cost and what might be faster.

    Every rank calls it at the same point, with nothing in flight, and gets the same. The slowest link gives what a ring
    gets of it. Memory within hosts is taken to be no slower; where it is, hierarchical collectives are measured to
    cost more. ``busy`` is the share of its time that training uses a CPU: where it is large, so is that of what is
    measured, and the cluster says how much rings on the channels in force slow computation down.
    """
    world_size = transport.world_size
    is_busy = busy >= BUSY
    timer = CollectiveTimer(transport, agreement, busy=is_busy)
    hosts = _seen(transport.hosts)
    least = 4 * world_size
    reduce_s = timer.alone_s((Selection(RING, ALL_REDUCE),), least, TOKENS)
    # Where rings on other channels keep cores from each other, that is what each of them costs.
    overhead_s = timer.saturated_s(RINGS, least, TOKENS)
    small = max(least, min(SMALL_BYTES, size_bytes // 8))
    small_s = timer.alone_s(RINGS, small, SMALLS) / 2
    alpha_s = reduce_s / 2  # of a ring whose bytes take no time
    if is_busy:
        alpha_s = max(alpha_s, timer.launched_s(RINGS[0], least, LAUNCHES))
    sized, sized_s = small, small_s
    # What links let through at once after a pause says nothing of their rate.
    while sized_s - alpha_s < TELLING_S and sized < min(LARGE_BYTES, size_bytes):
        sized *= LARGER
        sized_s = timer.alone_s(RINGS, sized, 1) / 2
    byte_s = max(LEAST_BYTE_S, (sized_s - alpha_s) / sized)
    large = max(2 * small, round(min(LARGE_BYTES, size_bytes, LONGEST_S / byte_s)))
    count = max(1, min(8, round(MEASURED_S / (2 * byte_s * large))))
    byte_s = max(LEAST_BYTE_S, timer.saturated_s(RINGS, large, count) / large)
    overhead_s = min(alpha_s, overhead_s)
    bucket_bytes = min(large, max(small, size_bytes // TYPICAL_BUCKETS))
    slowdown = timer.slowdown(RINGS, bucket_bytes, overhead_s + bucket_bytes * byte_s)
    others = world_size - 1
    gbps, latency_us = others / world_size / byte_s * 8 / 1e9, (alpha_s - overhead_s) / others * 1e6
    cluster = Cluster(
        hosts=tuple(_host(number, len(ranks), gbps) for number, ranks in enumerate(hosts.ranks)),
        latency_us=latency_us,
        local_gbps=max(gbps, LEAST_LOCAL_GBPS),
        local_latency_us=latency_us,
        algorithms={
            RING: AlgorithmCost(overhead_us=overhead_s * 1e6),
            DEFERRED_UPDATE: AlgorithmCost(overhead_us=update_overhead_ns / 1e3),
        },
        compute_slowdown=slowdown,
        source="measured while training",
    )
    cluster = cluster.model_copy(update={"burst_bytes": saved_bytes(cluster, small_s, small)})
    cluster = with_link_rates(cluster, transport, agreement)
    timing = _Timing(timer, least, small, large, count)
    found: dict[str, AlgorithmCost] = {}
    for algorithm in (ALGORITHMS[name] for name in FOR_HALVES if name != RING):
        if algorithm.differs(hosts):
            found |= timing.costs(algorithm, cluster, hosts, alpha_s)
    return cluster.model_copy(update={"algorithms": {**cluster.algorithms, **found}})


def _seen(hosts: Hosts) -> Hosts:
    """Hosts as a cluster has them: each rank is one by itself on a single host, or where ranks are in another order."""
    if len(hosts.ranks) > 1 and hosts.in_rank_order:
        return hosts
    return Hosts.of_places(range(hosts.world_size))


@dataclass(frozen=True, slots=True)
class _Timing:
    """How halves are timed, and of which sizes, the last ``count`` times."""

    timer: CollectiveTimer
    least_bytes: int
    small_bytes: int
    large_bytes: int
    count: int

    def costs(
        self, algorithm: Algorithm, cluster: Cluster, hosts: Hosts, ring_s: float
    ) -> dict[str, AlgorithmCost]:
        """What halves by ``algorithm`` cost, by name, if they start faster than a ring, which takes ``ring_s``.

        Others cannot win, as no collective moves fewer bytes than a ring, but for hierarchical ones.
        """
        costs = {}
        for kinds, pieces in algorithm.probed:
            if pieces == 1 and set(kinds) <= set(HALVES):
                selections = [Selection(algorithm.name, kind).on(hosts) for kind in kinds]
                alpha_s = self.timer.alone_s(selections, self.least_bytes, TOKENS) / len(selections)
                if alpha_s < ring_s or algorithm.follows_hosts:
                    costs[selections[0].cost_names[0]] = self._cost(algorithm, cluster, selections, alpha_s)
        return costs

    def _cost(
        self, algorithm: Algorithm, cluster: Cluster, selections: Sequence[Selection], alpha_s: float
    ) -> AlgorithmCost:
        """What our own cost that do not follow hosts is seen at the small size: they are for small buckets."""
        if algorithm.follows_hosts:
            size_bytes, took_s = (
                self.large_bytes,
                self.timer.saturated_s(selections, self.large_bytes, self.count),
            )
        else:
            size_bytes = self.large_bytes if algorithm.is_library else self.small_bytes
            count = self.count if algorithm.is_library else SMALLS
            took_s = self.timer.alone_s(selections, size_bytes, count) / len(selections)
        least_s, ideal_s = (
            statistics.fmean(seconds_alone(cluster, each.program_of, size) for each in selections)
            for size in (self.least_bytes, size_bytes)
        )
        overhead_s = max(0.0, alpha_s - least_s)
        factor = min(100.0, max(1.0, (took_s - overhead_s) / ideal_s))
        return AlgorithmCost(overhead_us=overhead_s * 1e6, byte_factor=factor)


def saved_bytes(cluster: Cluster, took_s: float, size_bytes: int) -> int:
    """What links let through as a burst after a pause, if that is why a ring of ``size_bytes`` took ``took_s``.

    While a ring's overhead is paid and between its messages a link has nothing to do. Shaped ones make up for that;
    where links do not, 0.
    """
    if took_s > _ring_s(cluster, size_bytes, 0) * (1 - STEADY):
        return 0
    low, high = 0, size_bytes
    while high - low > LEAST_SAVED_BYTES:
        middle = (low + high) // 2
        low, high = (middle, high) if _ring_s(cluster, size_bytes, middle) > took_s else (low, middle)
    return low


def _ring_s(cluster: Cluster, size_bytes: int, saved_bytes: int) -> float:
    """What half a ring takes in replay on links that have saved so much."""
    rested = cluster.model_copy(update={"burst_bytes": saved_bytes})
    ring = RINGS[0]
    return seconds_alone(rested, ring.program_of, size_bytes, ring.cost(rested))


def _host(number: int, workers: int, gbps: float) -> Host:
    return Host(name=f"host{number}", workers=workers, up_gbps=gbps, down_gbps=gbps)
