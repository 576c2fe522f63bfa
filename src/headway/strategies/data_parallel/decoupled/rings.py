"""How buckets' collectives are carried out: rings, prepared once for every channel, or a device's native ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from headway.collectives import live, native
from headway.collectives.program import pieces_for
from headway.strategies.data_parallel.decoupled.bucket import LiveBucket


class Collectives(Protocol):
    """Reduce-scatters and all-gathers of buckets."""

    def run(self, kind: str, bucket: LiveBucket, channel: int) -> None:
        """Run a collective of ``bucket`` on ``channel``."""


class Natives:
    """The process groups' own collectives, on the current stream; returns when they have been given to the device."""

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = groups

    def run(self, kind: str, bucket: LiveBucket, channel: int) -> None:
        """Run a collective of ``bucket`` on ``channel``."""
        native.COLLECTIVES[kind](bucket.buffer, self._groups[channel], bucket.buffer)


PrepareRing = Callable[[str, torch.Tensor, torch.Tensor, int, int], Callable[[], None]]
"""(kind, flat tensor, scratch, channel, pieces) to what is run on that channel."""


class Rings:
    """Reduce-scatters and all-gathers of buckets over the process groups of the channels."""

    def __init__(
        self, buckets: Sequence[LiveBucket], prepare: PrepareRing, channels: int, world_size: int
    ) -> None:
        self._prepare = prepare
        self._pieces = {
            b: pieces_for(b.buffer.numel() // world_size * b.buffer.element_size()) for b in buckets
        }
        needed: dict[torch.dtype, int] = {}
        for bucket, pieces in self._pieces.items():
            numel = live.scratch_numel(bucket.buffer.numel(), world_size, pieces)
            needed[bucket.buffer.dtype] = max(numel, needed.get(bucket.buffer.dtype, 0))
        self._scratch = [
            {d: torch.empty(n, dtype=d, device="cpu") for d, n in needed.items()} for _ in range(channels)
        ]
        self._prepared: dict[tuple[str, LiveBucket, int], Callable[[], None]] = {}

    def run(self, kind: str, bucket: LiveBucket, channel: int) -> None:
        """Run a collective of ``bucket`` on ``channel``; returns when this rank has done its part."""
        key = (kind, bucket, channel)
        if key not in self._prepared:
            scratch = self._scratch[channel][bucket.buffer.dtype]
            self._prepared[key] = self._prepare(kind, bucket.buffer, scratch, channel, self._pieces[bucket])
        self._prepared[key]()
