"""Policy of parameter servers (Li et al., OSDI 2014; BytePS, OSDI 2020): which gradients share a key."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from headway.collectives.servers import Serving
from headway.job import Job
from headway.scheduling.buckets import BucketSchedule
from headway.scheduling.ddp_buckets import Cap, assigned, size_limits_bytes
from headway.strategies.base import Strategy
from headway.units import counted

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

    servers: int | None = Field(default=None, ge=0, le=4096)
    """For predictions alone: on how many hosts without workers there are servers besides, as BytePS has them. Workers
    of a host then add up first, over the host's own links, and hosts push and pull for all of theirs. Null has every
    worker serve by itself."""

    @model_validator(mode="after")
    def _hosts_serve_by_their_links(self) -> Self:
        if self.servers is not None and (self.shares or self.pieces != 1):
            raise ValueError("servers excludes shares and pieces, which follow from it")
        return self

    def decide(self, job: Job) -> BucketSchedule:
        """Assign keys as DDP assigns buckets."""
        buckets = assigned(job.model, self.size_limits_bytes())
        return BucketSchedule(buckets, channels=self.channels, serving=self.serving)

    @property
    def serving(self) -> Serving:
        """How workers share the work."""
        return Serving(self.shares, self.pieces, self.servers)

    def size_limits_bytes(self) -> list[int]:
        """The size limits of keys, as DDP has them of buckets."""
        return size_limits_bytes(self.bucket_cap_mb)

    def describe(self) -> str:
        """Say the strategy and its options in a few words."""
        said = "parameter servers"
        if self.servers is not None:
            said += f" on the workers' hosts and {counted(self.servers, 'host')} more"
        said += f", keys of {self.bucket_cap_mb:g} MiB"
        said += f", {self.channels} channels" if self.channels > 1 else ""
        return said + (f", {self.shares_in_words}" if self.shares_in_words else "")

    @property
    def shares_in_words(self) -> str:
        """The shares by rank, and in how many pieces; "" where they are equal and in one."""
        said = [f"serving {':'.join(map(str, self.shares))}"] if self.shares else []
        return " ".join([*said, f"in {self.pieces} pieces"] if self.pieces > 1 else said)
