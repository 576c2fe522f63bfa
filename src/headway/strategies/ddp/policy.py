"""Policy of DistributedDataParallel: torch's own assignment of gradients to buckets."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from headway.compression.codec import Codec
from headway.compression.registry import NamedCodec
from headway.job import Job
from headway.scheduling.buckets import BucketSchedule, make_buckets, sent_as, whole_parameter
from headway.strategies.base import Strategy
from headway.units import counted

DEFAULT_CAP_MB = 25
DEFAULT_FIRST_BUCKET_BYTES = 2**20

COMPRESSED_CHANNELS = 2
"""How many buckets that a codec sends are in flight at a time, as many as Gloo serves of others."""

Cap = Annotated[float, Field(ge=0, le=1e6)]


def cap_bytes(bucket_cap_mb: float | None) -> int:
    """How much a bucket of DDP's takes at most, where ``bucket_cap_mb`` of None is torch's default."""
    return int((DEFAULT_CAP_MB if bucket_cap_mb is None else bucket_cap_mb) * 2**20)


class DistributedDataParallelStrategy(Strategy):
    """Stock DDP with one all-reduce per bucket."""

    name: ClassVar[str] = "ddp"

    bucket_cap_mb: Cap | None = None
    """The size of a bucket at most, in MiB; 0 makes one bucket per parameter, null leaves torch's default."""

    bucket_caps_mb: tuple[Cap, ...] = Field(default=(), max_length=100_000)
    """A cap for each bucket, in MiB, in the order in which gradients become ready; the last one is for all later
    buckets."""

    wire: tuple[NamedCodec | None, ...] = Field(default=(), max_length=100_000)
    """What each bucket is sent as, null for unchanged; the last one is for all later buckets. It changes numerics, so
    it is proposed only to those who permit it (``--allow precision``)."""

    @model_validator(mode="after")
    def _one_kind_of_cap(self) -> Self:
        if self.bucket_caps_mb and self.bucket_cap_mb is not None:
            raise ValueError("bucket_cap_mb and bucket_caps_mb exclude each other")
        return self

    def decide(self, job: Job) -> BucketSchedule:
        """Assign buckets as DDP does from its second iteration on, when it knows the order of readiness.

        torch uses a smaller first bucket (1 MiB) only while ``bucket_cap_mb`` is left at its default. With
        find_unused_parameters it keeps the buckets that it begins with: cut from the order of registration, and reduced
        in reverse.
        """
        from headway import torch_private  # torch takes seconds to import, and most commands do without

        model = job.model
        kept = model.find_unused_parameters
        parameters = model.parameters if kept else model.ready_parameters()
        groups = torch_private.ddp_bucket_assignment(
            [(p.shape, p.dtype) for p in parameters], self.size_limits_bytes()
        )
        if kept:
            groups.sort(key=min, reverse=True)
        buckets = make_buckets([[whole_parameter(parameters[i]) for i in group] for group in groups], model)
        return BucketSchedule(
            tuple(sent_as(each, self.wire_of(each.index), model, job.world_size) for each in buckets)
        )

    @property
    def largest_cap_bytes(self) -> int:
        """How much any of its buckets takes at most."""
        return cap_bytes(max(self.bucket_caps_mb) if self.bucket_caps_mb else self.bucket_cap_mb)

    def wire_of(self, bucket: int) -> Codec | None:
        """What the bucket of this index is sent as; None for as it is."""
        return self.wire[min(bucket, len(self.wire) - 1)] if self.wire else None

    def size_limits_bytes(self) -> list[int]:
        """The size limits DDP hands to its bucketing, bucket by bucket; the last is for all that follow."""
        if self.bucket_caps_mb:
            return [int(cap * 2**20) for cap in self.bucket_caps_mb]
        if self.bucket_cap_mb is None:
            return [DEFAULT_FIRST_BUCKET_BYTES, cap_bytes(None)]
        return [int(self.bucket_cap_mb * 2**20)]

    @property
    def changes_training(self) -> str:
        """What codecs lose of gradients."""
        codecs = [each for each in self._codecs() if each.loses]
        if not codecs:
            return ""
        some = "" if all(each is not None and each.loses for each in self.wire) else "in some buckets, "
        said = some + "gradients are " + "; or ".join(each.loses for each in codecs)
        kept = [each.feeds_back for each in codecs]
        if not any(kept):
            return said
        return f"{said}; what this leaves out is added in the next step" + ("" if all(kept) else ", of some")

    @property
    def permission(self) -> str:
        """That of its codecs, or the first of them."""
        return min(self.permissions, default="")

    @property
    def permissions(self) -> frozenset[str]:
        """Those of all its codecs."""
        return frozenset(each.permission for each in self._codecs()) - {""}

    def sent_as(self) -> str:
        """What gradients are sent as, in a few words."""
        return " and ".join(each.describe() for each in self._codecs())

    def _codecs(self) -> list[Codec]:
        return list(dict.fromkeys(each for each in self.wire if each is not None))

    def describe(self) -> str:
        """Say the strategy in a few words."""
        said = (
            "DDP, default buckets"
            if self.bucket_cap_mb is None
            else f"DDP, bucket_cap_mb={self.bucket_cap_mb:g}"
        )
        if self.bucket_caps_mb:
            said = f"DDP, caps for {counted(len(self.bucket_caps_mb), 'bucket')}"
        return f"{said}, sent as {self.sent_as()}" if self._codecs() else said
