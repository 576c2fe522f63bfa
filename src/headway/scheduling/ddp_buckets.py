"""How torch's DistributedDataParallel assigns gradients to buckets, and what its bucket sizes mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from headway.model import ModelSpec
from headway.scheduling.buckets import Bucket, make_buckets, whole_parameter

DEFAULT_CAP_MB = 25
DEFAULT_FIRST_BUCKET_BYTES = 2**20

COMPRESSED_CHANNELS = 2
"""How many buckets that a codec sends are in flight at a time, as many as Gloo serves of others."""

Cap = Annotated[float, Field(ge=0, le=1e6)]
"""The size of a bucket at most, in MiB."""


def cap_bytes(bucket_cap_mb: float | None) -> int:
    """How much a bucket of DDP's takes at most, where ``bucket_cap_mb`` of None is torch's default."""
    return int((DEFAULT_CAP_MB if bucket_cap_mb is None else bucket_cap_mb) * 2**20)


def size_limits_bytes(bucket_cap_mb: float | None, bucket_caps_mb: Sequence[float] = ()) -> list[int]:
    """The size limits DDP hands to its bucketing, bucket by bucket; the last is for all that follow.

    torch uses a smaller first bucket (1 MiB) only while ``bucket_cap_mb`` is left at its default.
    """
    if bucket_caps_mb:
        return [int(cap * 2**20) for cap in bucket_caps_mb]
    if bucket_cap_mb is None:
        return [DEFAULT_FIRST_BUCKET_BYTES, cap_bytes(None)]
    return [int(bucket_cap_mb * 2**20)]


def assigned(model: ModelSpec, limits_bytes: Sequence[int]) -> tuple[Bucket, ...]:
    """The buckets that DDP has from its second iteration on, when it knows the order of readiness.

    With find_unused_parameters it keeps the buckets that it begins with: cut from the order of registration, and
    reduced in reverse.
    """
    from headway import torch_private  # torch takes seconds to import, and most commands do without

    kept = model.find_unused_parameters
    parameters = model.parameters if kept else model.ready_parameters()
    groups = torch_private.ddp_bucket_assignment([(p.shape, p.dtype) for p in parameters], list(limits_bytes))
    if kept:
        groups.sort(key=min, reverse=True)
    return make_buckets([[whole_parameter(parameters[i]) for i in group] for group in groups], model)
