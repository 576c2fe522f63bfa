"""What a paced pipeline's parts take alone."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import nn


def message_ms(size_bytes: int) -> float:
    """What one message from rank 0 to rank 1 takes that rank 1 waits for, on links that have rested."""
    tensor, token = torch.zeros(size_bytes // 4), torch.zeros(1)
    taken = []
    for _ in range(5):
        dist.barrier()
        time.sleep(0.2)
        if dist.get_rank() == 1:
            receive = dist.irecv(tensor, 0)
            assert receive is not None
            dist.send(token, 0)
            start = time.monotonic()
            receive.wait()
            taken.append((time.monotonic() - start) * 1e3)
        elif dist.get_rank() == 0:
            dist.recv(token, 1)
            dist.send(tensor, 1)
    found = torch.tensor([median(taken) if taken else 0.0])
    dist.broadcast(found, 1)
    return float(found)


def stream_ms(size_bytes: int, count: int = 8) -> float:
    """What one of many messages from rank 0 to rank 1 takes that follow each other without a rest."""
    found = torch.zeros(1)
    dist.barrier()
    if dist.get_rank() == 1:
        receives = [dist.irecv(torch.zeros(size_bytes // 4), 0) for _ in range(count)]
        moments = []
        for receive in receives:
            assert receive is not None
            receive.wait()
            moments.append(time.monotonic())
        found[0] = (moments[-1] - moments[0]) * 1e3 / (count - 1)
    elif dist.get_rank() == 0:
        sends = [dist.isend(torch.zeros(size_bytes // 4), 1) for _ in range(count)]
        for send in sends:
            assert send is not None
            send.wait()
    dist.broadcast(found, 1)
    return float(found)


def passes_ms(stage: nn.Module, shape: Sequence[int], repeats: int = 5) -> list[float]:
    """A forward and a backward of one sample of ``shape``, on one rank after the other."""
    found: list[float] = []
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            found = _passes_ms(stage, shape, repeats)
    return found


def _passes_ms(stage: nn.Module, shape: Sequence[int], repeats: int) -> list[float]:
    batch = torch.ones(1, *shape, requires_grad=True)
    taken = []
    for _ in range(repeats):
        start = time.monotonic()
        output = stage(batch)
        middle = time.monotonic()
        output.mean().backward()
        taken.append(((middle - start) * 1e3, (time.monotonic() - middle) * 1e3))
    return [median(one for one, _ in taken), median(other for _, other in taken)]


def cpu_s() -> float:
    """The CPU time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
