"""Measures the time of codecs on this job's cores, concurrent with computation, and how much they slow that down.

The live runtime's code for a bucket is timed (``ddp.sending``), without communication: other ranks are assumed to send
the same as this one.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist

from headway.cluster import CodecCost
from headway.collectives.algorithms import ALL_GATHER
from headway.compression.codec import Codec, Sent
from headway.compression.registry import proposed
from headway.errors import one_line
from headway.network.interference import RaisingThread, Work, repeat, stop_if_asked
from headway.strategies.ddp.compressed import Outgoing, send

SIZES_MIB = (0.25, 2.0)
REPEATS, TURNS = 3, 4
ALONE_S = 0.1
MOST_SLOWDOWN = 10.0
MIB = 2**20


def codec_costs(codecs: Iterable[Codec] | None = None, *, busy_cores: bool = True) -> dict[str, CodecCost]:
    """The cost of each codec by ``cost_name``, averaged over ranks. Every rank calls it at the same point.

    ``codecs`` default to all proposed ones. ``busy_cores`` says that training computes on the same cores. A codec that
    fails on some rank is left out with a warning from rank 0, and keeps its default costs.
    """
    work = Work() if busy_cores else None
    able = [codec for codec in (proposed() if codecs is None else codecs) if _can_be_measured(codec)]
    return {codec.cost_name: _mean(_cost(codec, work)) for codec in able}


def _can_be_measured(codec: Codec) -> bool:
    """Whether ``codec`` works, with as many exchanges for small as for large buckets, on all ranks."""
    counts, why = set(), ""
    try:
        for size_mib in SIZES_MIB:
            watched = _TimedBucket(codec, round(size_mib * MIB))
            watched.run()
            counts.add(len(watched.stretches_us[0]))
    except Exception as error:  # a plug-in's fault must not end a recorded job
        cause = error.__cause__ or error
        why = f"{type(cause).__name__}: {cause}"
    if len(counts) > 1:
        why = f"buckets of {SIZES_MIB[0]} and {SIZES_MIB[1]} MiB have different numbers of exchanges"
    if why and dist.get_rank() == 0:  # not warnings.warn, which a script may turn into an error
        text = f"headway: warning: the codec {codec.name} was not measured, its defaults count: {why}"
        print(one_line(text, 500), file=sys.stderr)
    failed = torch.tensor([bool(why)], dtype=torch.int32)
    dist.all_reduce(failed)
    return not bool(failed.item())


def _cost(codec: Codec, work: Work | None) -> CodecCost:
    small_us: list[float] = []
    large_us: list[float] = []
    slowdowns: list[float] = []
    stop_if_asked()
    alone_s = 0.0 if work is None else work.seconds_alone(ALONE_S)
    for size_mib, times_us in zip(SIZES_MIB, (small_us, large_us), strict=True):
        watched = _TimedBucket(codec, round(size_mib * MIB))
        watched.run()  # warm-up: allocates memory and finds directions
        watched.stretches_us.clear()
        for _ in range(REPEATS):
            dist.barrier()
            if work is None:
                repeat(watched.run, TURNS)
                continue
            thread = RaisingThread(partial(repeat, watched.run, TURNS))
            thread.start()
            slowdowns.append(work.seconds_each(thread.is_alive) / alone_s - 1)
            thread.finish()
        times_us += [statistics.median(stretch_us) for stretch_us in zip(*watched.stretches_us, strict=True)]
    mib = SIZES_MIB[1] - SIZES_MIB[0]
    mib_us = [max(0.0, (large - small) / mib) for small, large in zip(small_us, large_us, strict=True)]
    bucket_us = [
        max(0.0, us - stretch_us * SIZES_MIB[0]) for us, stretch_us in zip(small_us, mib_us, strict=True)
    ]
    slowdown = min(max(0.0, statistics.median(slowdowns)), MOST_SLOWDOWN) if slowdowns else 0.0
    return CodecCost(bucket_us=tuple(bucket_us), mib_us=tuple(mib_us), slowdown=slowdown)


def _mean(rank_cost: CodecCost) -> CodecCost:
    """The mean cost over ranks."""
    flat = torch.tensor([*rank_cost.bucket_us, *rank_cost.mib_us, rank_cost.slowdown], dtype=torch.float64)
    dist.all_reduce(flat)
    *us, slowdown = (flat / dist.get_world_size()).tolist()
    half = len(us) // 2
    return CodecCost(bucket_us=tuple(us[:half]), mib_us=tuple(us[half:]), slowdown=slowdown)


class _TimedBucket:
    """One bucket that is sent repeatedly, with the times of its stretches of computation."""

    def __init__(self, codec: Codec, size_bytes: int) -> None:
        rows = 512
        shape = (rows, size_bytes // 4 // rows)
        self._codec = codec
        self._gradients = torch.randn(shape[0] * shape[1])
        kept = torch.zeros_like(self._gradients) if codec.feeds_back else None
        self._bucket = Outgoing(self._gradients.clone(), kept, [shape], [0])
        self._memory: dict[int, torch.Tensor] = {}
        self._begun_s = 0.0
        self._us: list[float] = []
        self.stretches_us: list[list[float]] = []

    def run(self) -> None:
        """Send the bucket once more."""
        self._bucket.buffer.copy_(self._gradients)
        self._us = []
        self._begun_s = time.perf_counter()
        send(self._codec, self._bucket, self._exchange, self._memory, dist.get_rank(), dist.get_world_size())
        self.stretches_us.append([*self._us, (time.perf_counter() - self._begun_s) * 1e6])

    def _exchange(self, sent: Sent) -> torch.Tensor:
        self._us.append((time.perf_counter() - self._begun_s) * 1e6)
        result = sent.operand
        if sent.kind == ALL_GATHER:
            result = result.view(1, -1).repeat(dist.get_world_size(), 1)
        self._begun_s = time.perf_counter()
        return result
