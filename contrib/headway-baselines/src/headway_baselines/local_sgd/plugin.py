"""Local SGD and DiLoCo as a strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.errors import UnsupportedError
from headway.job import Job
from headway.permission import LOCAL_STEPS
from headway.strategies.footprint import Footprint
from headway.strategies.horizon import Outcome
from headway.strategies.plugin import Proposal
from headway.tool_settings import Settings
from headway_baselines.local_sgd import footprint
from headway_baselines.local_sgd.policy import LocalSGDStrategy
from headway_baselines.local_sgd.schedule import PeriodicSchedule
from headway_baselines.unreduced_plugin import UnreducedPlugin

if TYPE_CHECKING:
    from torch import nn

    from headway_baselines.local_sgd.runtime import LocalSGD


PERIODS = (2, 4, 8, 16)


class _Plugin(UnreducedPlugin[LocalSGDStrategy]):
    policy = LocalSGDStrategy
    library_calls = ("allreduce",)
    not_replayed = (
        "local SGD has no steps that all ranks finish together, so no recording under it is replayed"
    )

    def runtime(self) -> type[LocalSGD]:
        from headway_baselines.local_sgd.runtime import LocalSGD

        return LocalSGD

    def over_a_horizon(self, job: Job, strategy: LocalSGDStrategy) -> Outcome:
        from headway_baselines.local_sgd.horizon import over_a_horizon

        return over_a_horizon(job, strategy.decide(job))

    def propose(self, job: Job) -> Proposal:
        """Periods of a few lengths, for users who permit steps of each rank's own; with no bound.

        Longer ones are always faster, and further from what all-reduce trains: that is for the user to weigh.
        """
        if job.world_size < 2 or not job.has_parameters:
            return Proposal()
        if why := job.refusals.get(self.policy.name):
            return Proposal(note=f"local SGD was not considered: {why}", about_permitted=LOCAL_STEPS)
        return Proposal(tuple(LocalSGDStrategy(steps=steps) for steps in PERIODS))

    def footprint(self, job: Job, schedule: PeriodicSchedule, stage: int) -> Footprint:
        return footprint.footprint(job.stages[stage], schedule)

    def as_run(self, strategy: LocalSGDStrategy, job: Job) -> LocalSGDStrategy:
        """Raises UnsupportedError where the model cannot be trained so."""
        if why := job.refusals.get(self.name):
            raise UnsupportedError("the recorded job cannot be trained by local SGD", got=why)
        return strategy

    def settings_for(self, tool: str, strategy: LocalSGDStrategy, job: Job | None) -> Settings | None:
        """Torch's own local SGD, where gradients are DDP's."""
        from headway_baselines.local_sgd.settings import settings

        del job
        return settings(strategy) if tool == "ddp" else None

    def refusal(self, wrapped: nn.Module, *, compiled_around: bool) -> str:
        from headway_baselines import unreduced

        return unreduced.refusal(wrapped, compiled_around=compiled_around, called="local SGD")


PLUGIN = _Plugin()
