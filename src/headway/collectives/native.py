"""The process group's own collectives, in the form of the live executor's: in place, on a flat tensor.

And those of codecs, on the CPU, whose operands live no longer than the collective: straight on the backend.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from headway import torch_private
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


def summed(operand: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``operand``, with the sum over the ranks of ``group`` in its place."""
    torch_private.sum_on_backend(operand, group)
    return operand


def gathered(operand: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """What every rank of ``group`` brings, flat and of one size, as the rows of a new tensor, in the order of ranks."""
    rows = operand.new_empty(group.size() * operand.numel())
    torch_private.gather_on_backend(rows, operand.view(-1), group)
    return rows.view(group.size(), -1)


def exchanged(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Row ``r`` of ``rows`` to rank ``r``; what it sends here is row ``r`` of the result."""
    received = torch.empty_like(rows)
    torch_private.exchange_on_backend(received, rows, group)
    return received


COLLECTIVES = {ALL_REDUCE: all_reduce, REDUCE_SCATTER: reduce_scatter, ALL_GATHER: all_gather}
