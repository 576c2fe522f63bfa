"""Policy of parameter servers (Li et al., OSDI 2014; BytePS, OSDI 2020): which gradients share a key."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from headway.job import Job
from headway.scheduling.buckets import BucketSchedule
from headway.strategies.base import Strategy
from headway.strategies.data_parallel.ddp.policy import Cap, DistributedDataParallelStrategy


class ParameterServerStrategy(Strategy):
    """Every worker is also a server for a share of every key, and adds up what is pushed to it."""

    name: ClassVar[str] = "parameter_server"

    bucket_cap_mb: Cap = 4.0
    """The size of a key at most, in MiB; keys are DDP's buckets."""

    channels: int = Field(default=2, ge=1, le=8)
    """How many keys are in flight at a time."""

    def decide(self, job: Job) -> BucketSchedule:
        """Assign keys as DDP assigns buckets."""
        buckets = self.bucketing().decide(job).buckets
        return BucketSchedule(buckets, channels=self.channels)

    def bucketing(self) -> DistributedDataParallelStrategy:
        """What cuts gradients into keys."""
        return DistributedDataParallelStrategy(bucket_caps_mb=(self.bucket_cap_mb,))

    def describe(self) -> str:
        """Say the strategy and its options in a few words."""
        said = f"parameter servers, keys of {self.bucket_cap_mb:g} MiB"
        return f"{said}, {self.channels} channels" if self.channels > 1 else said
