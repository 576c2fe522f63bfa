"""What stock DDP holds: its buckets, apart from the gradients unless ``gradient_as_bucket_view`` makes one of both."""

from __future__ import annotations

from headway.model import ModelSpec
from headway.scheduling.buckets import BucketSchedule
from headway.strategies.footprint import Footprint


def footprint(model: ModelSpec, schedule: BucketSchedule, world_size: int) -> Footprint:
    """What one of ``world_size`` ranks holds."""
    del world_size
    return Footprint(
        buffers_bytes=sum(bucket.size_bytes for bucket in schedule.buckets),
        state_bytes=model.optimizer_state_bytes,
        gradients_apart=model.pass_memory is None or model.pass_memory.gradients_apart,
        updated_share=1.0,
    )
