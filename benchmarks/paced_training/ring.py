"""The one place where the benchmarks' own schedulers touch Headway's live executor."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from headway.collectives.live import Prepared
from headway.collectives.program import ring_all_gather, ring_reduce_scatter, scratch_numel


def ring(
    buffer: torch.Tensor, group: dist.ProcessGroup, gathers: dist.ProcessGroup | None = None
) -> tuple[Callable[[], None], Callable[[], None], int]:
    """Reduce-scatter and all-gather of ``buffer`` in place, ready to be run, and the bytes of scratch they hold.

    The latter is over ``gathers``, another group of the same ranks, where that is given.
    """
    rank, world_size = group.rank(), group.size()
    scratch = buffer.new_empty(scratch_numel(buffer.numel(), world_size))
    scatter = Prepared(ring_reduce_scatter(rank, world_size), buffer, group, scratch)
    gather = Prepared(ring_all_gather(rank, world_size), buffer, gathers or group, scratch)
    return scatter.run, gather.run, scratch.numel() * scratch.element_size()
