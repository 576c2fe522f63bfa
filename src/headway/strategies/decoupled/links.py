"""What this model's collectives cost, and what they cost its computation, measured in place on its own channels."""

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
from headway.collectives.hierarchical import Hosts
from headway.collectives.selection import Selection
from headway.network.collective_costs import seconds_alone
from headway.network.fit import link_rates
from headway.network.interference import Work
from headway.strategies.decoupled.transport import BucketTransport
from headway.strategies.live.agreement import Agreement
from headway.strategies.live.channels.communication import Job

RATE_REPEATS = 2
MESSAGE_S = 0.1  # of a message over the slowest link
MOST_BYTES = 16 * 2**20
LEAST_UNEQUAL = 1.25  # times the slowest rate: what is closer may be noise of busy cores


def with_link_rates(cluster: Cluster, transport: BucketTransport, agreement: Agreement) -> Cluster:
    """``cluster``, whose links are as the slowest of them, with what each link carries besides.

    Every rank sends to the next one at once, and to others where links prove to be unequal. Every rank calls it at the
    same point, with nothing in flight. It stays as it is where links are about equal, and where hosts have several
    workers, which share one.
    """
    if transport.world_size < 3 or not apart(transport.hosts):
        return cluster
    slowest_gbps = cluster.hosts[0].up_gbps
    size_bytes = min(MOST_BYTES, int(slowest_gbps * 1e9 / 8 * MESSAGE_S) + cluster.burst_bytes)

    def rates(stride: int) -> list[float]:
        """By sender."""
        took_s = _received_s(transport, agreement, size_bytes, stride)
        return [1 / took_s[(place + stride) % len(took_s)] for place in range(len(took_s))]

    up, down = link_rates(rates)
    slowest = min(*up, *down)
    if max(*up, *down) < slowest * LEAST_UNEQUAL:
        return cluster
    scale = slowest_gbps / slowest
    hosts = [
        host.model_copy(update={"up_gbps": sends * scale, "down_gbps": receives * scale})
        for host, sends, receives in zip(cluster.hosts, up, down, strict=True)
    ]
    return cluster.model_copy(update={"hosts": tuple(hosts)})


def apart(hosts: Hosts) -> bool:
    """Whether every rank has a host, and with it a link, of its own."""
    return len(hosts.ranks) == hosts.world_size


def _received_s(
    transport: BucketTransport, agreement: Agreement, size_bytes: int, stride: int
) -> Sequence[float]:
    """By rank, the seconds after which a message of the rank ``stride`` before it has come."""
    outgoing, incoming = torch.zeros(2, size_bytes, dtype=torch.uint8, device="cpu")
    took_s: list[float] = []

    def run(channel: int) -> None:
        took_s.append(transport.exchange(outgoing, incoming, stride, channel))

    for _ in range(RATE_REPEATS):
        transport.meet()
        transport.wait(transport.submit(Job("all_reduce", -1, size_bytes, run)))
    return [min(each) for each in agreement.from_each(took_s)]


REPEATS = 3
INTERFERING_S = 0.15  # of rings that computation is concurrent with
MOST_SLOWDOWN = 4.0  # more is a rank that something else has held up


class CollectiveTimer:
    """Times halves of ``selections`` on ``transport``. Every rank asks the same at the same point, nothing in flight.

    Where ``busy``, the thread that trains computes meanwhile, as it does in training.
    """

    def __init__(self, transport: BucketTransport, agreement: Agreement, *, busy: bool) -> None:
        self._transport, self._agreement = transport, agreement
        self._work = Work() if busy else None

    def alone_s(self, selections: Sequence[Selection], size_bytes: int, count: int) -> float:
        """Seconds of one of each of ``selections`` in one channel, of ``count`` without a pause.

        The median of the slowest rank's.
        """
        took_s: list[float] = []
        for _ in range(REPEATS):
            told: list[tuple[float, float]] = []
            self._wait([self._submit(selections, size_bytes, count, told)])
            took_s += [end_s - begun_s for begun_s, end_s in told]
        return statistics.median(self._agreement.slowest(took_s)) / count

    def launched_s(self, selection: Selection, size_bytes: int, count: int) -> float:
        """Seconds from a launch by the thread that trains to the end of one half in a channel that was idle.

        The median of ``count``, each as the rank has it that launched last and so waited for no other. Where cores are
        busy a thread that wakes up waits for one.
        """
        took_s: list[float] = []
        for _ in range(count):
            told: list[tuple[float, float]] = []
            launched_s = time.perf_counter()
            # None behind the one that ranks begin together behind: that is the launch.
            self._wait([self._submit([selection], size_bytes, 0, told)])
            took_s += [end_s - launched_s for _, end_s in told]
        launched_last_s: list[float] = [
            min(each) for each in zip(*self._agreement.from_each(took_s), strict=True)
        ]
        return statistics.median(launched_last_s)

    def saturated_s(self, selections: Sequence[Selection], size_bytes: int, count: int) -> float:
        """Seconds that a half costs where every channel has one in flight, as in training: what its bytes take.

        One channel alone leaves the links idle while it waits for messages, which shaped links make up for later and
        real ones do not; either way it says little of what several get through.
        """
        took_s: list[float] = []
        channels = self._transport.used
        for _ in range(REPEATS):
            told: list[tuple[float, float]] = []
            begun_s = time.perf_counter()
            self._wait([self._submit(selections, size_bytes, count, told) for _ in range(channels)])
            took_s.append(max(end_s for _, end_s in told) - begun_s)
        halves = channels * len(selections) * (count + 1)  # with the one that ranks begin together behind
        return statistics.median(self._agreement.slowest(took_s)) / halves

    def slowdown(self, selections: Sequence[Selection], size_bytes: int, half_s: float) -> float:
        """How much longer computation takes while all channels have ``selections`` in flight: the mean of ranks.

        A half takes about ``half_s``. 0 where ranks are not busy: then nothing shares their cores.
        """
        if self._work is None:
            return 0.0
        channels = self._transport.used
        count = max(1, round(INTERFERING_S / (len(selections) * half_s * channels)))
        found = []
        for _ in range(REPEATS):
            self._transport.meet()
            alone_s = self._work.seconds_alone(INTERFERING_S)
            self._transport.meet()
            jobs = [self._submit(selections, size_bytes, count, []) for _ in range(channels)]
            together_s = self._work.seconds_each(lambda jobs=jobs: not any(map(_is_done, jobs)))  # type: ignore[misc]
            found.append(together_s / alone_s - 1)
            for job in jobs:
                self._transport.wait(job)
        own = min(MOST_SLOWDOWN, max(0.0, statistics.median(found)))
        return statistics.fmean(each for (each,) in self._agreement.from_each([own]))

    def _submit(
        self, selections: Sequence[Selection], size_bytes: int, count: int, told: list[tuple[float, float]]
    ) -> Job:
        run = partial(_run, self._transport, selections, size_bytes, count, told.append)
        return self._transport.submit(Job("all_reduce", -1, size_bytes, run))

    def _wait(self, jobs: Sequence[Job]) -> None:
        if self._work is not None:
            self._work.seconds_each(lambda: not all(map(_is_done, jobs)))
        for job in jobs:
            self._transport.wait(job)


def _is_done(job: Job) -> bool:
    return job.done.is_set()


def _run(
    transport: BucketTransport,
    selections: Sequence[Selection],
    size_bytes: int,
    count: int,
    tell: Callable[[tuple[float, float]], None],
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
    begun_s = time.perf_counter()
    for _ in range(count):
        for action in actions:
            action()
    tell((begun_s, time.perf_counter()))


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
