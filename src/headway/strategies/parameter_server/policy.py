"""Policy of parameter servers (Li et al., OSDI 2014; BytePS, OSDI 2020): which gradients share a key."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from headway.collectives.servers import Serving
from headway.job import Job
from headway.scheduling.buckets import BucketSchedule
from headway.scheduling.ddp_buckets import Cap, assigned, size_limits_bytes
from headway.strategies.base import Strategy

LEAST_PIECE_MB = 1 / 16
"""Of a key, where plans are proposed: more and smaller messages cost the cores more than is predicted of them."""


class ParameterServerStrategy(Strategy):
    """Every worker is also a server for a share of every key, and adds up what is pushed to it."""

    name: ClassVar[str] = "parameter_server"

    bucket_cap_mb: Cap = 4.0
    """The size of a key at most, in MiB; keys are DDP's buckets."""

    channels: int = Field(default=2, ge=1, le=8)
    """How many keys are in flight at a time."""

    shares: tuple[Annotated[int, Field(ge=1, le=1000)], ...] = ()
    """How many parts of every key each worker serves, by rank, of as many as all have together; if empty, each serves
    as much as any other. A worker on a slow link should serve less: it sends its gradient and what it serves."""

    pieces: int = Field(default=1, ge=1, le=64)
    """In how many pieces a worker's share of a key is pushed and pulled: while one is pulled the next is pushed. That
    gains with unequal shares alone."""

    def decide(self, job: Job) -> BucketSchedule:
        """Assign keys as DDP assigns buckets."""
        buckets = assigned(job.model, self.size_limits_bytes())
        return BucketSchedule(buckets, channels=self.channels, serving=self.serving)

    @property
    def serving(self) -> Serving:
        """How workers share the work."""
        return Serving(self.shares, self.pieces)

    def size_limits_bytes(self) -> list[int]:
        """The size limits of keys, as DDP has them of buckets."""
        return size_limits_bytes(self.bucket_cap_mb)

    def describe(self) -> str:
        """Say the strategy and its options in a few words."""
        said = f"parameter servers, keys of {self.bucket_cap_mb:g} MiB"
        said += f", {self.channels} channels" if self.channels > 1 else ""
        return said + (f", {self.shares_in_words}" if self.shares_in_words else "")

    @property
    def shares_in_words(self) -> str:
        """The shares by rank, and in how many pieces; "" where they are equal and in one."""
        said = [f"serving {':'.join(map(str, self.shares))}"] if self.shares else []
        return " ".join([*said, f"in {self.pieces} pieces"] if self.pieces > 1 else said)
