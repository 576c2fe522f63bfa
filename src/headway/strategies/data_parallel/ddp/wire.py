"""DDP whose buckets are sent as other types than gradients have: a communication hook that casts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from headway.strategies.data_parallel.ddp.policy import DistributedDataParallelStrategy

_SENT_AS = "_headway_sent_as"


def install(wrapped: DistributedDataParallel, strategy: DistributedDataParallelStrategy) -> None:
    """Have ``wrapped`` send its buckets as ``strategy`` says: sums are of what is sent, in its precision."""
    wrapped.register_comm_hook((wrapped.process_group, strategy), _reduce)
    setattr(wrapped, _SENT_AS, [None if each is None else {"dtype": each.dtype} for each in strategy.wire])


def installed(wrapped: DistributedDataParallel) -> list[dict[str, str] | None] | None:
    """The option ``wire`` of the strategy that ``install`` was given, if it was called."""
    sent_as: list[dict[str, str] | None] | None = getattr(wrapped, _SENT_AS, None)
    return sent_as


def _reduce(
    state: tuple[dist.ProcessGroup, DistributedDataParallelStrategy], bucket: Any
) -> torch.futures.Future[Any]:
    group, strategy = state
    buffer: torch.Tensor = bucket.buffer()
    wire = strategy.wire_of(bucket.index())
    sent = buffer if wire is None else buffer.to(getattr(torch, wire.dtype))
    sent.div_(group.size())
    work = dist.all_reduce(sent, group=group, async_op=True)
    assert work is not None

    def received(done: torch.futures.Future[Any]) -> torch.Tensor:
        result: torch.Tensor = done.value()[0]
        return buffer if result.data_ptr() == buffer.data_ptr() else buffer.copy_(result)

    future: torch.futures.Future[Any] = work.get_future().then(received)
    return future


_reduce.__annotations__.clear()  # DDP compares them with types, and here they are names
