"""What computing codecs takes on this job's cores, concurrent with training's computation, and what it costs that.

What is timed is what the live runtime does to a bucket (``ddp.sending``), with nothing between encoding and decoding:
the other ranks are taken to send what this one does.
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
    """The cost of each codec by the name of its cost, the mean over ranks. Every rank calls it at the same point.

    ``codecs`` are by default all that are proposed. ``busy_cores`` says that training computes on the same cores. A
    codec that fails on some rank has no cost, and rank 0 says why: its own defaults count.
    """
    work = Work() if busy_cores else None
    able = [codec for codec in (proposed() if codecs is None else codecs) if _can_be_measured(codec)]
    return {codec.cost_name: _mean(_cost(codec, work)) for codec in able}


def _can_be_measured(codec: Codec) -> bool:
    """Whether ``codec`` sends small and large buckets in as many exchanges, on all ranks: others would wait for one."""
    counts, why = set(), ""
    try:
        for size_mib in SIZES_MIB:
            watched = _Watched(codec, round(size_mib * MIB))
            watched.run()
            counts.add(len(watched.stretches_us[0]))
    except Exception as error:  # a foreign codec's fault must not end a job that is being recorded
        cause = error.__cause__ or error
        why = f"{type(cause).__name__}: {cause}"
    if len(counts) > 1:
        why = f"buckets of {SIZES_MIB[0]} and {SIZES_MIB[1]} MiB have different numbers of exchanges"
    if why and dist.get_rank() == 0:  # no warnings.warn: a script may have made it an error
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
    for size_mib, found in zip(SIZES_MIB, (small_us, large_us), strict=True):
        watched = _Watched(codec, round(size_mib * MIB))
        watched.run()  # memory is there, and directions are known
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
        found += [statistics.median(each) for each in zip(*watched.stretches_us, strict=True)]
    mib = SIZES_MIB[1] - SIZES_MIB[0]
    mib_us = [max(0.0, (large - small) / mib) for small, large in zip(small_us, large_us, strict=True)]
    bucket_us = [max(0.0, us - each * SIZES_MIB[0]) for us, each in zip(small_us, mib_us, strict=True)]
    slowdown = min(max(0.0, statistics.median(slowdowns)), MOST_SLOWDOWN) if slowdowns else 0.0
    return CodecCost(bucket_us=tuple(bucket_us), mib_us=tuple(mib_us), slowdown=slowdown)


def _mean(own: CodecCost) -> CodecCost:
    """The mean of every rank's cost."""
    flat = torch.tensor([*own.bucket_us, *own.mib_us, own.slowdown], dtype=torch.float64)
    dist.all_reduce(flat)
    *us, slowdown = (flat / dist.get_world_size()).tolist()
    half = len(us) // 2
    return CodecCost(bucket_us=tuple(us[:half]), mib_us=tuple(us[half:]), slowdown=slowdown)


class _Watched:
    """One bucket that is sent over and over, and how long each stretch of computing took."""

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
        """Send it once more."""
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
