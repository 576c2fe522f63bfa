"""The process group's own collectives, in the form of the live executor's: in place, on a flat tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from headway.collectives.algorithms import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from headway.collectives.program import chunk_bounds, owned_chunk

# From torch 2.13 the older names warn of their deprecation.
_torch: Any = dist
_reduce_scatter = getattr(_torch, "reduce_scatter_single", None) or _torch.reduce_scatter_tensor
_all_gather = getattr(_torch, "all_gather_single", None) or _torch.all_gather_into_tensor


def all_reduce(flat: torch.Tensor, group: dist.ProcessGroup, scratch: torch.Tensor) -> None:
    """Sum ``flat`` of shape (numel,) over the ranks of ``group``."""
    dist.all_reduce(flat, group=group)


def reduce_scatter(flat: torch.Tensor, group: dist.ProcessGroup, scratch: torch.Tensor) -> None:
    """Sum this rank's chunk of ``flat`` over the ranks of ``group``; its numel is a multiple of their number."""
    _reduce_scatter(_own_chunk(flat, group), flat, group=group)


def all_gather(flat: torch.Tensor, group: dist.ProcessGroup, scratch: torch.Tensor) -> None:
    """Bring every rank's chunk of ``flat`` to all of ``group``; its numel is a multiple of their number."""
    _all_gather(flat, _own_chunk(flat, group), group=group)


def _own_chunk(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    rank, world_size = group.rank(), group.size()
    assert flat.numel() % world_size == 0
    return flat[slice(*chunk_bounds(flat.numel(), world_size)[owned_chunk(rank, world_size)])]


COLLECTIVES = {ALL_REDUCE: all_reduce, REDUCE_SCATTER: reduce_scatter, ALL_GATHER: all_gather}
