"""What each rank does for the tests of the live executor."""

from __future__ import annotations

import torch
import torch.distributed as dist

from headway.collectives import live
from headway.collectives.program import (
    chunk_bounds,
    owned_chunk,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)


def check_all(rank: int, world_size: int) -> list[str]:
    """Every dtype and size against sums that are exact in every dtype; returns what was wrong."""
    problems = []
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for numel in (1, 2, world_size, 7, 1000):
            parts = [torch.arange(numel).remainder(5).add(r).to(dtype) for r in range(world_size)]
            total = sum(parts[1:], parts[0])
            scratch = torch.empty(live.scratch_numel(numel, world_size), dtype=dtype)
            mine = slice(*chunk_bounds(numel, world_size)[owned_chunk(rank, world_size)])

            flat = parts[rank].clone()
            live.run(ring_reduce_scatter(rank, world_size), flat, group, scratch)
            if not torch.equal(flat[mine], total[mine]):
                problems.append(f"reduce-scatter of {numel} {dtype}")
            live.run(ring_all_gather(rank, world_size), flat, group, scratch)
            if not torch.equal(flat, total):
                problems.append(f"all-gather of {numel} {dtype}")
            flat = parts[rank].clone()
            live.run(ring_all_reduce(rank, world_size), flat, group, scratch)
            if not torch.equal(flat, total):
                problems.append(f"all-reduce of {numel} {dtype}")
    return problems
