"""Policy of asynchronous parameter servers (Dean et al., NIPS 2012; bounded: Ho et al., NIPS 2013)."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from headway.job import Job
from headway.strategies.base import Strategy
from headway_baselines.asynchronous_servers.schedule import ShardSchedule, even_shards


class AsynchronousServersStrategy(Strategy):
    """Every worker is also the server of a share of the parameters, which it updates with each gradient that comes.

    Workers do not wait for each other. It does not train as all-reduce does: a gradient is computed with parameters
    that others have updated meanwhile, and which ones depends on when workers come.
    """

    name: ClassVar[str] = "asynchronous-parameter-server"

    staleness: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """How many iterations a worker may be ahead of the slowest before it waits (stale synchronous parallel); null is no
    bound."""

    def decide(self, job: Job) -> ShardSchedule:
        """Cut the parameters into even shares."""
        shards, sizes_bytes = even_shards(job.model, job.world_size)
        return ShardSchedule(job.world_size, shards, sizes_bytes, self.staleness)

    @property
    def changes_training(self) -> str:
        """Late gradients of one rank each."""
        bound = (
            ""
            if self.staleness is None
            else f", by at most {self.staleness} iterations more than the slowest"
        )
        return (
            "each gradient updates the model by itself, computed with parameters that others have updated meanwhile"
            f"{bound}; which ones depends on when ranks come, so two runs differ"
        )

    def describe(self) -> str:
        """Say the strategy and its options in a few words."""
        bound = "" if self.staleness is None else f", at most {self.staleness} iterations ahead"
        return f"asynchronous parameter servers{bound}"
