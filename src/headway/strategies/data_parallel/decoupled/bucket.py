"""The live state of buckets: their buffers, where parameters lie in them, and which are settled together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from headway import torch_private
from headway.collectives.program import chunk_bounds
from headway.scheduling.buckets import Bucket
from headway.strategies.data_parallel.channels.communication import Job
from headway.strategies.data_parallel.channels.streams import BufferFence
from headway.strategies.data_parallel.channels.wiring import Wiring

if TYPE_CHECKING:
    from headway.strategies.data_parallel.decoupled.parameter_state import ParameterState


class BucketView:
    """Where elements ``start`` to ``end`` of a parameter lie: at ``offset`` of a bucket's buffer.

    ``view`` is that piece of the buffer, flat; ``shaped`` has the parameter's shape where it is the whole parameter.
    """

    def __init__(
        self, bucket: LiveBucket, parameter: torch.Tensor, start: int, end: int, offset: int
    ) -> None:
        self.bucket, self.start, self.end, self.offset = bucket, start, end, offset
        self.view = bucket.buffer[offset : offset + end - start]
        with torch_private.without_subclass_dispatch():
            whole = end - start == parameter.numel()
            self.shaped = self.view.view(parameter.shape) if whole else None


class LiveBucket:
    """A bucket with its buffer. ``buffer`` has a multiple of the world size of elements, the last ones unused.

    ``device`` is the parameters', and may be another than the buffer's: see ``wiring``. On a device every use of the
    buffer takes its turn.
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
        self._plain = wiring.device.type == "cpu"  # work is done when it has been given: no turn to take
        self.bounds = chunk_bounds(self.buffer.numel(), world_size)
        self.own = slice(*self.bounds[rank])
        self.slots: list[ParameterState] = []
        self.unit: SettleGroup
        self.reductions = 0  # how many reduce-scatters have been submitted
        self.gathers = 0  # and all-gathers
        self.reduce: Job | None = None
        self.gather: Job | None = None

    def fill(self, place: BucketView, gradient: torch.Tensor, scale: float) -> None:
        """Put the part of ``gradient`` that belongs to ``place`` there, times ``scale``."""
        if self._plain and place.shaped is not None:
            torch.mul(gradient, scale, out=place.shaped)
            return
        with self.fence.acquire():
            part = gradient.reshape(-1)[place.start : place.end]
            if self._apart:  # whoever reads the buffer waits for this turn
                place.view.copy_(part * scale, non_blocking=True)
            else:
                torch.mul(part, scale, out=place.view)

    def clear(self, place: BucketView | None = None) -> None:
        """Put zeros at ``place``, or everywhere."""
        with self.fence.acquire_on_host():
            (self.buffer if place is None else place.view).zero_()


class SettleGroup:
    """Buckets that are settled together because they share parameters; most units are one bucket."""

    def __init__(self, buckets: list[LiveBucket]) -> None:
        self.buckets = buckets
        self.slots = list(dict.fromkeys(slot for bucket in buckets for slot in bucket.slots))
        for bucket in buckets:
            bucket.unit = self
        for slot in self.slots:
            slot.unit = self
        self.in_flight = False
        self.stepped = False  # with parameters gathered: an update is under way

    @contextmanager
    def acquire(self) -> Iterator[None]:
        """A turn of every bucket."""
        with ExitStack() as turns:
            for bucket in self.buckets:
                turns.enter_context(bucket.fence.acquire())
            yield
