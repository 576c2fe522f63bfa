"""What parameter servers hold: what DDP does, and what a rank receives to add up, once a channel."""

from __future__ import annotations

from dataclasses import replace

from headway.collectives.program import scratch_numel_of
from headway.model import ModelSpec
from headway.scheduling.buckets import BucketSchedule
from headway.strategies import ddp_steps as ddp
from headway.strategies.footprint import Footprint


def footprint(model: ModelSpec, schedule: BucketSchedule, world_size: int) -> Footprint:
    """What the rank holds that serves most. Raises PlanError for shares of others than ``world_size`` ranks."""
    schedule.serving.check(world_size)
    stock = ddp.footprint(model, schedule, world_size)
    largest: dict[str, int] = {}  # bucket of each type, which has scratch memory of its own
    for bucket in schedule.buckets:
        largest[bucket.dtype] = max(bucket.size_bytes, largest.get(bucket.dtype, 0))
    shares = schedule.serving.shares
    most = shares.index(max(shares)) if shares else 0
    program = schedule.serving.program(most, world_size)
    scratch_bytes = schedule.channels * sum(scratch_numel_of(program, each) for each in largest.values())
    return replace(stock, buffers_bytes=stock.buffers_bytes + scratch_bytes)
