"""What the decoupled all-reduce holds: buckets that are the gradients' only memory, and scratch of its rings.

Where parameters are gathered, a rank keeps its shard of the gradients and of the optimizer's state, and while it
updates a bucket the state of its share before and after.
"""

from __future__ import annotations

from headway.collectives.algorithms import ALL_GATHER, REDUCE_SCATTER
from headway.collectives.program import scratch_numel
from headway.model import ModelSpec
from headway.scheduling.buckets import BucketSchedule
from headway.strategies.held import Held


def held(model: ModelSpec, schedule: BucketSchedule, world_size: int) -> Held:
    """What one of ``world_size`` ranks holds."""
    sizes_bytes = [bucket.size_bytes for bucket in schedule.buckets]
    largest = max(sizes_bytes, default=0)
    scratch_bytes = max(
        (
            scratch_numel(size, world_size, schedule.algorithms.select(kind, size, world_size).pieces)
            for size in sizes_bytes
            for kind in (REDUCE_SCATTER, ALL_GATHER)
        ),
        default=0,
    )
    buffers_bytes = sum(sizes_bytes) + schedule.channels * scratch_bytes
    state_bytes = model.optimizer_state_bytes
    if schedule.gather == "parameters":
        shard_bytes = -(-model.size_bytes // world_size)
        share = largest / world_size / max(1, model.size_bytes)
        state_bytes = -(-state_bytes // world_size) + round(state_bytes * share)
        buffers_bytes += shard_bytes
    return Held(buffers_bytes, state_bytes, gradients_apart=False, update_bytes=largest)
