"""What stock DDP holds: its buckets, apart from the gradients unless ``gradient_as_bucket_view`` makes one of both.

Codecs hold what error feedback keeps, as large as the buckets, and work on copies of those that are on their way.
"""

from __future__ import annotations

from headway.compression.codec import element_bytes
from headway.model import DTYPE_BYTES, ModelSpec
from headway.scheduling.buckets import Bucket, BucketSchedule
from headway.strategies.ddp.policy import COMPRESSED_CHANNELS
from headway.strategies.footprint import Footprint

COPIES = 3  # of a bucket, while a codec computes


def footprint(model: ModelSpec, schedule: BucketSchedule, world_size: int) -> Footprint:
    """What one of ``world_size`` ranks holds."""
    del world_size
    sent = [bucket for bucket in schedule.buckets if bucket.wire is not None]
    kept_bytes = sum(_computed_bytes(bucket) for bucket in sent if bucket.wire and bucket.wire.feeds_back)
    copies_bytes = COMPRESSED_CHANNELS * COPIES * max(map(_computed_bytes, sent), default=0)
    return Footprint(
        buffers_bytes=sum(bucket.size_bytes for bucket in schedule.buckets) + kept_bytes + copies_bytes,
        state_bytes=model.optimizer_state_bytes,
        gradients_apart=model.pass_memory is None or model.pass_memory.gradients_apart,
        updated_share=1.0,
    )


def _computed_bytes(bucket: Bucket) -> int:
    return bucket.size_bytes // DTYPE_BYTES[bucket.dtype] * element_bytes(bucket.dtype)
