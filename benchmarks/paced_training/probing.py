"""What the network gives in this very run: goodput of every link used at once, and what an all-reduce costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

_REPEATS = 3


@dataclass(frozen=True)
class AlphaBeta:
    """What an all-reduce takes: ``alpha_s`` to start, ``beta_s`` a byte."""

    alpha_s: float
    beta_s: float


def goodput_bytes_per_s(size_bytes: int) -> float:
    """The slowest rank's rate when every rank sends ``size_bytes`` to the next and receives as much."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    outgoing = torch.ones(max(1, size_bytes // 4))
    incoming = torch.empty_like(outgoing)

    def once() -> None:
        receiving = dist.irecv(incoming, (rank - 1) % world_size)
        sending = dist.isend(outgoing, (rank + 1) % world_size)
        assert receiving is not None
        assert sending is not None
        receiving.wait()
        sending.wait()

    return 4 * outgoing.numel() / _median_s(once)


def all_reduce_cost(large_bytes: int) -> AlphaBeta:
    """Alpha and beta from an all-reduce of next to nothing and one of ``large_bytes``."""
    small_s = _all_reduce_s(16)
    large_s = _all_reduce_s(max(64, large_bytes // 4))
    return AlphaBeta(small_s, max(0.0, large_s - small_s) / max(256, large_bytes))


def _all_reduce_s(numel: int) -> float:
    data = torch.ones(numel)
    return _median_s(lambda: dist.all_reduce(data))


def slowest(value: float) -> float:
    """The largest of all ranks' values."""
    box = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box)


def _median_s(work: Callable[[], object]) -> float:
    times = []
    for attempt in range(_REPEATS + 1):
        dist.barrier()
        start = time.perf_counter()
        work()
        if attempt:
            times.append(slowest(time.perf_counter() - start))
        else:
            slowest(0.0)
    return statistics.median(times)
