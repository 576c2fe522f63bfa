"""What the decoupled all-reduce holds: buckets apart from each rank's own gradients, and scratch of its collectives.

A rank's own gradients are there until the next forward needs their parameters. Where gradients are gathered, a bucket
is updated when its own are gone, so that its update needs no more than they did. Where parameters are gathered, a rank
keeps its shard of the gradients and of the optimizer's state, and of the bucket that it updates the state before
and after.
"""

from __future__ import annotations

from headway.collectives.algorithms import ALL_GATHER, REDUCE_SCATTER
from headway.model import ModelSpec
from headway.scheduling.buckets import BucketSchedule
from headway.strategies.footprint import Footprint


def footprint(model: ModelSpec, schedule: BucketSchedule, world_size: int) -> Footprint:
    """What one of ``world_size`` ranks holds."""
    sizes_bytes = [bucket.size_bytes for bucket in schedule.buckets]
    scratch_bytes = max(
        (
            schedule.algorithms.select(kind, size, world_size).scratch_numel(size, world_size)
            for size in sizes_bytes
            for kind in (REDUCE_SCATTER, ALL_GATHER)
        ),
        default=0,
    )
    buffers_bytes = sum(sizes_bytes) + schedule.channels * scratch_bytes
    if schedule.halves is not None:
        buffers_bytes += sum(schedule.half_bytes(REDUCE_SCATTER, bucket) for bucket in schedule.buckets)
    state_bytes, share = model.optimizer_state_bytes, 0.0
    if schedule.gather == "parameters":
        buffers_bytes += -(-model.size_bytes // world_size)
        share = max(sizes_bytes, default=0) / world_size / max(1, model.size_bytes)
        state_bytes = -(-state_bytes // world_size) + round(state_bytes * share)
    return Footprint(buffers_bytes, state_bytes, gradients_apart=True, updated_share=share)
