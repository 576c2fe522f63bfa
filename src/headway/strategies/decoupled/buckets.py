"""The live state of buckets: flat buffers, where parameters lie in them, and copies between both."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway import torch_private
from headway.collectives.program import chunk_bounds
from headway.scheduling.buckets import Bucket
from headway.strategies.live.channels.communication import Job
from headway.strategies.live.channels.streams import BufferFence
from headway.strategies.live.channels.wiring import Wiring


class BucketView:
    """Where elements ``start`` to ``end`` of a parameter lie: at ``offset`` of a bucket's buffer.

    ``flat`` is that piece of the buffer; ``shaped`` has the parameter's shape where it is the whole parameter.
    """

    def __init__(
        self, bucket: LiveBucket, parameter: torch.Tensor, start: int, end: int, offset: int
    ) -> None:
        self.bucket, self.start, self.end, self.offset = bucket, start, end, offset
        self.flat = bucket.buffer[offset : offset + end - start]
        with torch_private.without_subclass_dispatch():
            whole = end - start == parameter.numel()
            self.shaped = self.flat.view(parameter.shape) if whole else None


class LiveBucket:
    """A bucket with its buffer. ``buffer`` has a multiple of the world size of elements, the last ones unused.

    ``device`` is the parameters', and may be another than the buffer's: see ``wiring``. On a device every use of the
    buffer goes through its ``fence``.
    """

    def __init__(self, bucket: Bucket, world_size: int, rank: int, wiring: Wiring) -> None:
        self.device = wiring.device
        self.fence = BufferFence(wiring.streams, on_host=wiring.pinned)
        self.index = bucket.index
        self.size_bytes = bucket.size_bytes
        numel = sum(part.numel for part in bucket.parts)
        self.buffer = torch.zeros(
            -(-numel // world_size) * world_size, dtype=getattr(torch, bucket.dtype), device=wiring.buffers,
            pin_memory=wiring.pinned,
        )  # fmt: skip
        self._apart = self.buffer.device != wiring.device
        self._plain = wiring.device.type == "cpu"  # work is done when it has been given: no fence to pass
        self.bounds = chunk_bounds(self.buffer.numel(), world_size)
        self.own = slice(*self.bounds[rank])
        self.reductions = 0  # how many reduce-scatters have been submitted
        self.gathers = 0  # and all-gathers
        self.reduce: Job | None = None
        self.gather: Job | None = None

    def fill(self, view: BucketView, gradient: torch.Tensor, scale: float) -> None:
        """Put the part of ``gradient`` that belongs to ``view`` there, times ``scale``."""
        if self._plain and view.shaped is not None:
            torch.mul(gradient, scale, out=view.shaped)
            return
        with self.fence.acquire():
            part = gradient.reshape(-1)[view.start : view.end]
            if self._apart:  # whoever reads the buffer waits behind the fence
                view.flat.copy_(part * scale, non_blocking=True)
            else:
                torch.mul(part, scale, out=view.flat)

    def clear(self, view: BucketView | None = None) -> None:
        """Put zeros at ``view``, or everywhere."""
        with self.fence.acquire_on_host():
            (self.buffer if view is None else view.flat).zero_()


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
