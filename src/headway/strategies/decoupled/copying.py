"""Copies between parameters and the flat buffers of buckets, and whether two tensors are the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway import torch_private
from headway.strategies.decoupled.bucket import BucketView


def copy_views(targets: Sequence[tuple[torch.Tensor, BucketView]]) -> None:
    """Write what lies in each view over the elements of its target that it stands for, in the target's logical order.

    Out of pinned memory this is done in the current stream's time: buffers must not change before.
    """
    whole = [(target, view.shaped) for target, view in targets if view.shaped is not None]
    if whole:
        torch_private.foreach_copy([t for t, _ in whole], [s for _, s in whole], non_blocking=True)
    for target, view in targets:
        if view.shaped is None:
            flat_copy(target, view.start, view.flat)


def flat_copy(target: torch.Tensor, start: int, source: torch.Tensor) -> None:
    """Write the flat ``source`` over the elements from ``start`` on of ``target``, in its logical order.

    Out of pinned memory as ``copy_views``.
    """
    end = start + source.numel()
    if end - start == target.numel():
        target.copy_(source.view(target.shape), non_blocking=True)
    elif target.is_contiguous():
        target.view(-1)[start:end].copy_(source, non_blocking=True)
    else:
        whole = target.reshape(-1)
        whole[start:end] = source
        target.copy_(whole.view(target.shape))


def laid_out_like(parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Zeros of the shape and strides of ``parameter``, of the dtype of ``flat``.

    Fused optimizers pair the elements of a parameter, its gradient and its state by where they lie in memory.
    """
    with torch.no_grad(), torch_private.without_subclass_dispatch():
        return torch.zeros_like(parameter, dtype=flat.dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype are equal, NaN for NaN. Versions would not tell: ``.data`` has its own."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.detach().view(bits), other.detach().view(bits))
