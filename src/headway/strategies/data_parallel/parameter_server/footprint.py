"""What parameter servers hold: what DDP does, and what a rank receives to add up, once a channel."""

from __future__ import annotations

from dataclasses import replace

from headway.collectives.program import scratch_numel_of
from headway.collectives.servers import push_and_pull
from headway.model import ModelSpec
from headway.scheduling.buckets import BucketSchedule
from headway.strategies.data_parallel.ddp import footprint as ddp
from headway.strategies.footprint import Footprint


def footprint(model: ModelSpec, schedule: BucketSchedule, world_size: int) -> Footprint:
    """What one of ``world_size`` ranks holds."""
    stock = ddp.footprint(model, schedule, world_size)
    largest = max((bucket.size_bytes for bucket in schedule.buckets), default=0)
    scratch_bytes = schedule.channels * scratch_numel_of(push_and_pull(0, world_size), largest)
    return replace(stock, buffers_bytes=stock.buffers_bytes + scratch_bytes)
