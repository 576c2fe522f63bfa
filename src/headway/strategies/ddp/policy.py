"""Policy of DistributedDataParallel: torch's own assignment of gradients to buckets."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from headway.compression.codec import Codec
from headway.compression.registry import NamedCodec
from headway.job import Job
from headway.scheduling.buckets import BucketSchedule, sent_as
from headway.scheduling.ddp_buckets import Cap, assigned, cap_bytes, size_limits_bytes
from headway.strategies.base import Strategy
from headway.units import counted


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
        """Assign buckets as DDP does (``scheduling.ddp_buckets``)."""
        model = job.model
        buckets = assigned(model, self.size_limits_bytes())
        return BucketSchedule(
            tuple(sent_as(bucket, self.wire_of(bucket.index), model, job.world_size) for bucket in buckets)
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
        return size_limits_bytes(self.bucket_cap_mb, self.bucket_caps_mb)

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
