"""The one adapter to names of torch that are not public. Nothing else in Headway may use such a name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.distributed_c10d import _compute_bucket_assignment_by_size  # type: ignore[attr-defined]


def ddp_bucket_assignment(
    shapes: Sequence[tuple[tuple[int, ...], str]], limits_bytes: list[int]
) -> list[list[int]]:
    """Ask DDP's own bucketing how it would group tensors of these shapes and dtypes, in this order."""
    if not shapes:
        return []
    tensors = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape, dtype in shapes]
    assigned, _ = _compute_bucket_assignment_by_size(
        tensors, limits_bytes, [False] * len(tensors), list(range(len(tensors)))
    )
    return [list(group) for group in assigned]
