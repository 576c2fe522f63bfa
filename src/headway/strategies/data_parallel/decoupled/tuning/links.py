"""What this model's collectives cost, measured in place: on its own channels, with nothing else in flight."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

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
from headway.network.interference import Work
from headway.strategies.data_parallel.channels.communication import Job
from headway.strategies.data_parallel.decoupled.transport import BucketTransport
from headway.strategies.data_parallel.decoupled.tuning.agreement import Agreement
from headway.strategies.data_parallel.decoupled.tuning.link_rates import with_link_rates

REPEATS = 3
TOKENS = 10  # rings of next to nothing in one measurement
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
BUCKETS = 16  # about as many as a planned schedule has
INTERFERING_S = 0.15  # of rings that computation is concurrent with
MOST_SLOWDOWN = 4.0
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
    cost more. ``busy`` is the share of its time that training uses a CPU.
    """
    world_size = transport.world_size
    timed = partial(_collectives_s, transport, agreement, busy=busy >= BUSY)
    saturated = partial(_saturated_s, transport, agreement, busy=busy >= BUSY)
    hosts = _seen(transport.hosts)
    least = 4 * world_size
    reduce_s = timed((Selection(RING, ALL_REDUCE),), least, TOKENS)
    # Where rings on other channels keep cores from each other, that is what each of them costs.
    overhead_s = saturated(RINGS, least, TOKENS)
    small = max(least, min(SMALL_BYTES, size_bytes // 8))
    small_s = timed(RINGS, small, SMALLS) / 2
    alpha_s = reduce_s / 2  # of a ring whose bytes take no time
    sized, sized_s = small, small_s
    # What links let through at once after a pause says nothing of their rate.
    while sized_s - alpha_s < TELLING_S and sized < min(LARGE_BYTES, size_bytes):
        sized *= LARGER
        sized_s = timed(RINGS, sized, 1) / 2
    byte_s = max(LEAST_BYTE_S, (sized_s - alpha_s) / sized)
    large = max(2 * small, round(min(LARGE_BYTES, size_bytes, LONGEST_S / byte_s)))
    count = max(1, min(8, round(MEASURED_S / (2 * byte_s * large))))
    byte_s = max(LEAST_BYTE_S, saturated(RINGS, large, count) / large)
    overhead_s = min(alpha_s, overhead_s)
    bucket = min(large, max(small, size_bytes // BUCKETS))
    slowdown = _slowdown(transport, agreement, bucket, bucket * byte_s) if busy >= BUSY else 0.0
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
    timing = _Timing(timed, saturated, least, small, large, count)
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
    """How halves are timed: one channel's alone, and all channels'; and of which sizes, the last ``count`` times."""

    timed: Callable[[Sequence[Selection], int, int], float]
    saturated: Callable[[Sequence[Selection], int, int], float]
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
                alpha_s = self.timed(selections, self.least_bytes, TOKENS) / len(selections)
                if alpha_s < ring_s or algorithm.follows_hosts:
                    costs[selections[0].cost_names[0]] = self._cost(algorithm, cluster, selections, alpha_s)
        return costs

    def _cost(
        self, algorithm: Algorithm, cluster: Cluster, selections: Sequence[Selection], alpha_s: float
    ) -> AlgorithmCost:
        """What our own cost that do not follow hosts is seen at the small size: they are for small buckets."""
        if algorithm.follows_hosts:
            size_bytes, took_s = self.large_bytes, self.saturated(selections, self.large_bytes, self.count)
        else:
            size_bytes = self.large_bytes if algorithm.is_library else self.small_bytes
            count = self.count if algorithm.is_library else SMALLS
            took_s = self.timed(selections, size_bytes, count) / len(selections)
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


def _collectives_s(
    transport: BucketTransport,
    agreement: Agreement,
    selections: Sequence[Selection],
    size_bytes: int,
    count: int,
    *,
    busy: bool,
) -> float:
    """Seconds of one of each of ``selections``, of ``count`` without a pause: the median of the slowest rank's."""
    took_s: list[float] = []
    for _ in range(REPEATS):
        run = partial(_run, transport, selections, size_bytes, count, took_s.append)
        job = transport.submit(Job("all_reduce", -1, size_bytes, run))
        if busy:
            Work().seconds_each(partial(_in_flight, job))
        transport.wait(job)
    return statistics.median(agreement.slowest(took_s)) / count


def _saturated_s(
    transport: BucketTransport,
    agreement: Agreement,
    selections: Sequence[Selection],
    size_bytes: int,
    count: int,
    *,
    busy: bool,
) -> float:
    """Seconds that a half costs where every channel has one in flight, as in training: what its bytes take.

    One channel alone leaves the links idle while it waits for messages, which shaped links make up for later and real
    ones do not; either way it says little of what several get through.
    """
    took_s: list[float] = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        run = partial(_run, transport, selections, size_bytes, count, lambda _: None)
        jobs = [transport.submit(Job("all_reduce", -1, size_bytes, run)) for _ in range(transport.used)]
        if busy:
            Work().seconds_each(partial(_in_flight, jobs[-1]))
        for job in jobs:
            transport.wait(job)
        took_s.append(time.perf_counter() - begun)
    halves = len(jobs) * len(selections) * (count + 1)  # with the one that ranks begin together behind
    return statistics.median(agreement.slowest(took_s)) / halves


def _run(
    transport: BucketTransport,
    selections: Sequence[Selection],
    size_bytes: int,
    count: int,
    tell: Callable[[float], None],
    channel: int,
) -> None:
    world_size = transport.world_size
    # Whatever the script has made torch's defaults.
    flat = torch.zeros(-(-size_bytes // (4 * world_size)) * world_size, dtype=torch.float32, device="cpu")
    numel = max(s.scratch_numel(flat.numel(), world_size) for s in selections)
    scratch = torch.empty(numel, dtype=torch.float32, device="cpu")
    actions = [transport.prepare(selection, flat, scratch, channel) for selection in selections]
    for action in actions:  # ranks begin together behind it, and shaped links have spent what they had saved
        action()
    begun = time.perf_counter()
    for _ in range(count):
        for action in actions:
            action()
    tell(time.perf_counter() - begun)


def _in_flight(job: Job) -> bool:
    return not job.done.is_set()


def _slowdown(transport: BucketTransport, agreement: Agreement, size_bytes: int, ring_s: float) -> float:
    """How much longer computation takes while every channel has rings of ``size_bytes`` in flight: ranks' mean."""
    work, count = Work(), max(1, round(INTERFERING_S / 2 / ring_s / transport.used))
    found = []
    for _ in range(REPEATS):
        transport.meet()
        until = time.perf_counter() + INTERFERING_S
        alone_s = work.seconds_each(lambda until=until: time.perf_counter() < until)  # type: ignore[misc]
        run = partial(_run, transport, RINGS, size_bytes, count, lambda _: None)
        jobs = [transport.submit(Job("all_reduce", -1, size_bytes, run)) for _ in range(transport.used)]
        found.append(work.seconds_each(partial(_in_flight, jobs[-1])) / alone_s - 1)
        for job in jobs:
            transport.wait(job)
    mean = statistics.fmean(own[0] for own in agreement.from_each([statistics.median(found)]))
    return min(MOST_SLOWDOWN, max(0.0, mean))
