"""Partial all-reduce as a strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.errors import UnsupportedError
from headway.job import Job
from headway.scheduling.groups import CoordinatedGroups, GroupSchedule
from headway.strategies.decentralised.footprint import footprint
from headway.strategies.decentralised.policy import PartialAllReduceStrategy
from headway.strategies.footprint import Footprint
from headway.strategies.horizon import Outcome
from headway.strategies.plugin import StrategyPlugin

if TYPE_CHECKING:
    from torch import nn

    from headway.graph.build import GraphBuilder
    from headway.graph.step_layout import StepLayout


class _Plugin(StrategyPlugin[PartialAllReduceStrategy]):
    """It proposes nothing: what it trains depends on when ranks come, which only the user can permit."""

    policy = PartialAllReduceStrategy

    def reactions(self, graph: GraphBuilder[Any], job: Job) -> StepLayout:
        """Ranks do not take their steps together, so none are laid out: ``over_a_horizon`` simulates them."""
        raise UnsupportedError(
            "partial all-reduce has no steps that all ranks finish",
            expected="a simulation over a time",
            fix="Use headway replay --plan, or headway predict --strategy.",
        )

    def over_a_horizon(self, job: Job, strategy: PartialAllReduceStrategy) -> Outcome:
        from headway.strategies.decentralised.horizon import over_a_horizon

        return over_a_horizon(job, strategy)

    def footprint(self, job: Job, schedule: GroupSchedule | CoordinatedGroups, stage: int) -> Footprint:
        return footprint(job.stages[stage], getattr(schedule, "staleness", 1))

    def messages(self, schedule: Any, world_size: int, library: str) -> int:
        return 1

    def wrap(self, module: nn.Module, strategy: PartialAllReduceStrategy, **ddp_options: Any) -> nn.Module:
        raise UnsupportedError(
            "partial all-reduce cannot train yet, only be replayed and predicted",
            got=strategy.describe(),
            expected="a strategy with a live runtime",
            fix="Use headway replay --plan, or headway predict --strategy.",
        )


PLUGIN = _Plugin()
