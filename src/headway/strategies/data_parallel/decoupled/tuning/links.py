"""What this model's collectives cost, measured in place: on its own channels, with nothing else in flight."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from headway.cluster import DEFERRED_UPDATE, AlgorithmCost, Cluster, Host
from headway.collectives.algorithms import ALL_GATHER, ALL_REDUCE, NATIVE, REDUCE_SCATTER, RING
from headway.collectives.program import scratch_numel
from headway.collectives.selection import Selection
from headway.network.collective_costs import ideal_seconds
from headway.strategies.data_parallel.channels.communication import Job
from headway.strategies.data_parallel.decoupled.transport import BucketTransport
from headway.strategies.data_parallel.decoupled.tuning.agreement import Agreement

REPEATS = 3
TOKENS = 10  # rings of next to nothing in one measurement
SMALL_BYTES = 64 * 2**10
LARGE_BYTES = 4 * 2**20
LONGEST_S = 0.06  # of one ring
LEAST_BYTE_S = 1e-12
MEASURED_S = (
    0.1  # rings that follow each other without a pause: one would let shaped links save up for a burst
)
BUSY = 0.5  # from this share of CPU time on, rings are timed concurrently with computation, as they run in training
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

    Every rank calls it at the same point, with nothing in flight, and gets the same. Each rank counts as a host of its
    own, whose link gives what a ring gets of it. ``busy`` is the share of its time that training uses a CPU.
    """
    world_size = transport.world_size
    timed = partial(_collectives_s, transport, agreement, busy=busy >= BUSY)
    saturated = partial(_saturated_s, transport, agreement, busy=busy >= BUSY)
    least = 4 * world_size
    reduce_s = timed((Selection(RING, ALL_REDUCE),), least, TOKENS)
    # Where rings on other channels keep cores from each other, that is what each of them costs.
    overhead_s = saturated(least, TOKENS)
    small = max(least, min(SMALL_BYTES, size_bytes // 8))
    small_s = timed(RINGS, small, 4) / 2
    byte_s = max(LEAST_BYTE_S, (small_s - reduce_s / 2) / small)
    large = max(2 * small, round(min(LARGE_BYTES, size_bytes, LONGEST_S / byte_s)))
    count = max(1, min(8, round(MEASURED_S / (2 * byte_s * large))))
    byte_s = max(LEAST_BYTE_S, saturated(large, count) / large)
    alpha_s = reduce_s / 2  # of a ring whose bytes take no time
    overhead_s = min(alpha_s, overhead_s)
    others = world_size - 1
    cluster = Cluster(
        hosts=tuple(_host(rank, others / world_size / byte_s * 8 / 1e9) for rank in range(world_size)),
        latency_us=(alpha_s - overhead_s) / others * 1e6,
        algorithms={
            RING: AlgorithmCost(overhead_us=overhead_s * 1e6),
            DEFERRED_UPDATE: AlgorithmCost(overhead_us=update_overhead_ns / 1e3),
        },
        source="measured while training",
    )
    natives = _natives(cluster, timed, alpha_s, least, large, count)
    return cluster.model_copy(update={"algorithms": {**cluster.algorithms, **natives}})


def _natives(
    cluster: Cluster, timed: Callable[..., float], ring_s: float, least: int, large: int, count: int
) -> dict[str, AlgorithmCost]:
    """The costs of the process group's own halves, where they start faster than a ring, which takes ``ring_s``.

    Others cannot win: no collective moves fewer bytes than a ring.
    """
    costs = {}
    for kind in HALVES:
        selection = Selection(NATIVE, kind)
        alpha_s = timed((selection,), least, TOKENS)
        if alpha_s < ring_s:
            least_s, large_s = (ideal_seconds(cluster, selection.program_of, size) for size in (least, large))
            overhead_s = max(0.0, alpha_s - least_s)
            factor = (timed((selection,), large, count) - overhead_s) / large_s
            costs[selection.cost_names[0]] = AlgorithmCost(
                overhead_us=overhead_s * 1e6, byte_factor=min(100.0, max(1.0, factor))
            )
    return costs


def _host(rank: int, gbps: float) -> Host:
    return Host(name=f"rank{rank}", workers=1, up_gbps=gbps, down_gbps=gbps)


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
            _compute_until(job)
        transport.wait(job)
    return statistics.median(agreement.slowest(took_s)) / count


def _saturated_s(
    transport: BucketTransport, agreement: Agreement, size_bytes: int, count: int, *, busy: bool
) -> float:
    """Seconds that a ring half costs where every channel has one in flight, as in training: what its bytes take.

    One channel alone leaves the links idle while it waits for messages, which shaped links make up for later and real
    ones do not; either way it says little of what several get through.
    """
    took_s: list[float] = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        run = partial(_run, transport, RINGS, size_bytes, count, lambda _: None)
        jobs = [transport.submit(Job("all_reduce", -1, size_bytes, run)) for _ in range(transport.used)]
        if busy:
            _compute_until(jobs[-1])
        for job in jobs:
            transport.wait(job)
        took_s.append(time.perf_counter() - begun)
    rings = len(jobs) * len(RINGS) * (count + 1)  # with the one that ranks begin together behind
    return statistics.median(agreement.slowest(took_s)) / rings


def _run(
    transport: BucketTransport,
    selections: Sequence[Selection],
    size_bytes: int,
    count: int,
    tell: Callable[[float], None],
    channel: int,
) -> None:
    world_size = transport.world_size
    flat = torch.zeros(-(-size_bytes // (4 * world_size)) * world_size)
    scratch = torch.empty(scratch_numel(flat.numel(), world_size))
    actions = [transport.prepare(selection, flat, scratch, channel) for selection in selections]
    for action in actions:  # ranks begin together behind it, and shaped links have spent what they had saved
        action()
    begun = time.perf_counter()
    for _ in range(count):
        for action in actions:
            action()
    tell(time.perf_counter() - begun)


def _compute_until(job: Job) -> None:
    left, right = torch.ones(256, 256), torch.ones(256, 256)
    with torch.no_grad():
        while not job.done.is_set():
            torch.mm(left, right)
