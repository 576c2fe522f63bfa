"""Parameter servers as a strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headway.collectives.algorithms import NCCL, SERVERS
from headway.collectives.servers import EVENLY
from headway.job import Job
from headway.planning.bound import bound_of
from headway.scheduling.buckets import BucketSchedule
from headway.strategies.base import Strategy
from headway.strategies.footprint import Footprint
from headway.strategies.injection import Injection
from headway.strategies.parameter_server import footprint
from headway.strategies.parameter_server.policy import LEAST_PIECE_MB, ParameterServerStrategy
from headway.strategies.plugin import InForce, Proposal, StrategyPlugin

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from headway.graph.build import GraphBuilder
    from headway.graph.step_layout import StepLayout
    from headway.strategies.candidates import Candidate, Question
    from headway.strategies.live.stock import StockSteps

CAPS_MB, CHANNELS = (0.25, 1.0, 4.0, 16.0), (1, 2)
PIECES_OF_UNEQUAL = (4, 16)


class _Plugin(StrategyPlugin[ParameterServerStrategy]):
    policy = ParameterServerStrategy

    def reactions(
        self, graph: GraphBuilder[BucketSchedule], job: Job, strategy: ParameterServerStrategy
    ) -> StepLayout:
        del strategy
        from headway.strategies.parameter_server.reactions import Reactions

        return Reactions(graph, job)

    def footprint(self, job: Job, schedule: BucketSchedule, stage: int) -> Footprint:
        return footprint.footprint(job.stages[stage], schedule, job.world_size)

    def messages(self, schedule: BucketSchedule, world_size: int, library: str) -> int:
        """As many as each key has pieces."""
        return len(schedule.buckets) * schedule.serving.pieces

    def propose(self, job: Job) -> Proposal:
        """Keys of a few sizes, where a probe has measured servers; where links are unequal with unequal shares too.

        All push at once, which costs more than the messages by themselves: by how much only a probe can say.
        """
        if job.on.library == NCCL or SERVERS not in job.on.algorithms:
            return Proposal()
        proposed = [
            ParameterServerStrategy(bucket_cap_mb=cap, channels=channels)
            for channels in CHANNELS
            for cap in CAPS_MB
        ]
        from headway.strategies.parameter_server.shares import shares_on

        if unequal := shares_on(job.on):
            proposed += [
                ParameterServerStrategy(bucket_cap_mb=cap, channels=channels, shares=unequal, pieces=pieces)
                for channels in CHANNELS
                for pieces in PIECES_OF_UNEQUAL
                for cap in CAPS_MB
                if cap / pieces >= LEAST_PIECE_MB
            ]
        return Proposal.within(tuple(proposed), bound_of(job, "all-reduce"))

    def explain(self, before: Strategy, after: ParameterServerStrategy) -> Sequence[str]:
        had = before.serving if isinstance(before, ParameterServerStrategy) else EVENLY
        return [] if after.serving == had else [after.shares_in_words or "equal shares"]

    def wrap(self, module: nn.Module, strategy: ParameterServerStrategy, **ddp_options: Any) -> nn.Module:
        from headway.strategies.parameter_server import runtime

        return runtime.wrap(module, strategy, **ddp_options)

    def worth_trying(self, question: Question) -> Sequence[Candidate]:
        from headway.strategies.parameter_server.shares import worth_trying

        return worth_trying(question)

    def on_stock_ddp(self, strategy: ParameterServerStrategy) -> StockSteps:
        from headway.strategies.parameter_server import runtime

        return runtime.on_stock_ddp(strategy)

    def for_any_workers(self, strategy: ParameterServerStrategy) -> ParameterServerStrategy:
        return strategy.model_copy(update={"shares": (), "pieces": 1})

    @property
    def injection(self) -> Injection[ParameterServerStrategy]:
        return _Injection()

    def recognise(self, wrapped: nn.Module) -> InForce | None:
        from headway.strategies.parameter_server import runtime

        return runtime.in_force(wrapped)


class _Injection(Injection[ParameterServerStrategy]):
    def construct(
        self,
        init: Callable[..., None],
        wrapped: DistributedDataParallel,
        module: nn.Module,
        given: dict[str, Any],
        strategy: ParameterServerStrategy,
    ) -> None:
        from headway.strategies.parameter_server import runtime

        runtime.check(module, strategy, given)
        init(wrapped, module, **{**given, **runtime.options(strategy)})
        runtime.take_over(wrapped, strategy, given)


PLUGIN = _Plugin()
