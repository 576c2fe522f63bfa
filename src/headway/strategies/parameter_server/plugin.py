"""Parameter servers as a strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headway.bound import bound_of
from headway.collectives.algorithms import ALL_REDUCE, NCCL, SERVERS
from headway.collectives.program import scratch_numel_of
from headway.collectives.selection import Selection
from headway.collectives.server_hosts import pieces_of
from headway.collectives.servers import EVENLY
from headway.graph.build import GraphBuilder
from headway.job import Job
from headway.model import ModelSpec
from headway.scheduling.buckets import BucketSchedule
from headway.strategies import ddp_steps
from headway.strategies.base import Strategy
from headway.strategies.footprint import Footprint
from headway.strategies.injection import Injection
from headway.strategies.parameter_server.policy import LEAST_PIECE_MB, ParameterServerStrategy
from headway.strategies.plugin import InForce, Proposal, StrategyPlugin

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from headway.graph.step_layout import StepLayout
    from headway.strategies.candidates import Candidate, Question
    from headway.strategies.live.stock import StockSteps

ON_CPUS = "headway run has parameter servers for parameters on the CPU, and refuses them where NCCL is used"
PREDICTED = "servers on hosts are predicted alone: headway run refuses such a plan"
CAPS_MB, CHANNELS = (0.25, 1.0, 4.0, 16.0), (1, 2)
PIECES_OF_UNEQUAL = (4, 16)


class _Reactions(ddp_steps.Reactions):
    """DDP's reactions, with other all-reduces: each channel has connections of its own and serves one at a time."""

    def __init__(self, graph: GraphBuilder[BucketSchedule], job: Job) -> None:
        super().__init__(graph, job)
        graph.schedule.serving.check(graph.world_size)

    @property
    def at_a_time(self) -> int:
        """One a channel."""
        return self._graph.schedule.channels

    @property
    def channels_apart(self) -> bool:
        """Every channel has a process group of its own."""
        return True

    def selection(self, size_bytes: int) -> Selection:
        """Push and pull."""
        serving = self._graph.schedule.serving
        return Selection(
            SERVERS, ALL_REDUCE, serving.pieces, shares=serving.shares, server_hosts=serving.hosts
        )


class _Plugin(StrategyPlugin[ParameterServerStrategy]):
    policy = ParameterServerStrategy

    def reactions(
        self, graph: GraphBuilder[BucketSchedule], job: Job, strategy: ParameterServerStrategy
    ) -> StepLayout:
        del strategy
        return _Reactions(graph, job)

    def footprint(self, job: Job, schedule: BucketSchedule, stage: int) -> Footprint:
        return _footprint(job.stages[stage], schedule, job.world_size)

    def messages(self, schedule: BucketSchedule, world_size: int, library: str) -> int:
        """As many as each key has pieces; where hosts serve, each takes some operations of each."""
        servers = schedule.serving.hosts
        if servers is None:
            return len(schedule.buckets) * schedule.serving.pieces
        pieces = sum(pieces_of(bucket.size_bytes) for bucket in schedule.buckets)
        return -(-pieces * 3 * (world_size + servers) // world_size**2)

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

    def carried_out_by(
        self, strategy: ParameterServerStrategy, library: str
    ) -> tuple[ParameterServerStrategy, Sequence[str]]:
        if strategy.servers is not None:
            return strategy, (PREDICTED,)
        return strategy, (ON_CPUS,) if library == NCCL else ()

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


def _footprint(model: ModelSpec, schedule: BucketSchedule, world_size: int) -> Footprint:
    """What the rank holds that serves most. Raises PlanError for shares of others than ``world_size`` ranks."""
    schedule.serving.check(world_size)
    stock = ddp_steps.footprint(model, schedule, world_size)
    if schedule.serving.hosts is not None:
        return stock  # what serves is apart from the workers
    largest: dict[str, int] = {}  # bucket of each type, which has scratch memory of its own
    for bucket in schedule.buckets:
        largest[bucket.dtype] = max(bucket.size_bytes, largest.get(bucket.dtype, 0))
    shares = schedule.serving.shares
    most = shares.index(max(shares)) if shares else 0
    program = schedule.serving.program(most, world_size)
    scratch_bytes = schedule.channels * sum(scratch_numel_of(program, each) for each in largest.values())
    return replace(stock, buffers_bytes=stock.buffers_bytes + scratch_bytes)


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
