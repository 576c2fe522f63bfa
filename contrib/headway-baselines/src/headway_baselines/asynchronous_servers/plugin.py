"""Asynchronous parameter servers as a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway.collectives.algorithms import NCCL
from headway.job import Job
from headway.strategies.footprint import Footprint
from headway.strategies.horizon import Outcome
from headway_baselines.asynchronous_servers import footprint
from headway_baselines.asynchronous_servers.policy import AsynchronousServersStrategy
from headway_baselines.asynchronous_servers.schedule import ShardSchedule
from headway_baselines.unreduced_plugin import UnreducedPlugin

if TYPE_CHECKING:
    from headway_baselines.asynchronous_servers.runtime import AsynchronousServers


class _Plugin(UnreducedPlugin[AsynchronousServersStrategy]):
    policy = AsynchronousServersStrategy
    not_replayed = (
        "asynchronous servers have no steps that all ranks finish together, so no recording under them "
        "is replayed"
    )

    def runtime(self) -> type[AsynchronousServers]:
        from headway_baselines.asynchronous_servers.runtime import AsynchronousServers

        return AsynchronousServers

    def over_a_horizon(self, job: Job, strategy: AsynchronousServersStrategy) -> Outcome:
        from headway_baselines.asynchronous_servers.horizon import over_a_horizon

        return over_a_horizon(job, strategy.decide(job))

    def carried_out_by(
        self, strategy: AsynchronousServersStrategy, library: str
    ) -> tuple[AsynchronousServersStrategy, Sequence[str]]:
        said = "headway run has asynchronous servers for parameters on the CPU, and refuses them where NCCL is used"
        return strategy, (said,) if library == NCCL else ()

    def footprint(self, job: Job, schedule: ShardSchedule, stage: int) -> Footprint:
        return footprint.footprint(job.stages[stage], schedule)


PLUGIN = _Plugin()
