"""How buckets' collectives are carried out: in memory, prepared once for every channel, or by a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from headway.collectives import native
from headway.collectives.algorithms import ALL_GATHER, NATIVE, REDUCE_SCATTER, Run
from headway.collectives.program import scratch_numel
from headway.collectives.selection import Selection
from headway.scheduling.buckets import BucketSchedule
from headway.strategies.data_parallel.decoupled.bucket import LiveBucket

TAGS = 2**30  # messages are told apart among so many collectives


class Collectives(Protocol):
    """Reduce-scatters and all-gathers of buckets."""

    def run(self, kind: str, bucket: LiveBucket, channel: int, number: int) -> None:
        """Run a collective of ``bucket`` on ``channel``, its ``number``-th of that kind."""

    def algorithm(self, kind: str, bucket: LiveBucket) -> str:
        """What carries out a collective of ``bucket``."""


class BackendCollectives:
    """The process groups' own collectives, on the current stream; returns when they have been given to the device."""

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = groups

    def run(self, kind: str, bucket: LiveBucket, channel: int, number: int) -> None:
        """Run a collective of ``bucket`` on ``channel``; NCCL counts for itself."""
        del number
        native.COLLECTIVES[kind](bucket.buffer, self._groups[channel], bucket.buffer)

    def algorithm(self, kind: str, bucket: LiveBucket) -> str:
        """The backend's own, whatever a schedule says."""
        del kind, bucket
        return NATIVE


Prepare = Callable[[Selection, torch.Tensor, torch.Tensor, int], Run]
"""(selection, flat tensor, scratch, channel) to what is run on that channel."""


class ChunkProgramCollectives:
    """Reduce-scatters and all-gathers of buckets in memory, as a schedule selects them, over the channels' groups."""

    def __init__(
        self, buckets: Sequence[LiveBucket], prepare: Prepare, schedule: BucketSchedule, world_size: int
    ) -> None:
        self._prepare = prepare
        self._selected = {
            (kind, bucket): schedule.algorithms.select(kind, bucket.size_bytes, world_size)
            for bucket in buckets
            for kind in (REDUCE_SCATTER, ALL_GATHER)
        }
        needed: dict[torch.dtype, int] = {}
        for (_, bucket), selection in self._selected.items():
            numel = scratch_numel(bucket.buffer.numel(), world_size, selection.pieces)
            needed[bucket.buffer.dtype] = max(numel, needed.get(bucket.buffer.dtype, 0))
        self._scratch = [
            {d: torch.empty(n, dtype=d, device="cpu") for d, n in needed.items()}
            for _ in range(schedule.channels)
        ]
        self._prepared: dict[tuple[str, LiveBucket, int], Run] = {}

    def run(self, kind: str, bucket: LiveBucket, channel: int, number: int) -> None:
        """Run a collective of ``bucket`` on ``channel``; returns when this rank has done its part.

        Messages say which collective of which bucket they are of: ranks that disagree on that time out.
        """
        key = (kind, bucket, channel)
        if key not in self._prepared:
            scratch = self._scratch[channel][bucket.buffer.dtype]
            self._prepared[key] = self._prepare(self._selected[kind, bucket], bucket.buffer, scratch, channel)
        self._prepared[key](self._tag(kind, bucket, number))

    def _tag(self, kind: str, bucket: LiveBucket, number: int) -> int:
        return 2 + ((number * len(self._selected) // 2 + bucket.index) * 2 + (kind == ALL_GATHER)) % TAGS

    def algorithm(self, kind: str, bucket: LiveBucket) -> str:
        """What the schedule selects."""
        return self._selected[kind, bucket].algorithm
