"""Stock DistributedDataParallel as a strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headway.job import Job
from headway.planning.bound import bound_of
from headway.scheduling.buckets import BucketSchedule
from headway.strategies.data_parallel.ddp import footprint
from headway.strategies.data_parallel.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.footprint import Footprint
from headway.strategies.injection import Injection
from headway.strategies.plugin import InForce, Proposal, StrategyPlugin

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from headway.graph.build import GraphBuilder
    from headway.graph.step_layout import StepLayout

CAPS_MB = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0)


class _Plugin(StrategyPlugin[DistributedDataParallelStrategy]):
    policy = DistributedDataParallelStrategy
    usual = ("",)
    measured_after_recordings = True

    def reactions(self, graph: GraphBuilder[BucketSchedule], job: Job) -> StepLayout:
        from headway.strategies.data_parallel.ddp.reactions import Reactions

        return Reactions(graph, job)

    def footprint(self, job: Job, schedule: BucketSchedule, stage: int) -> Footprint:
        return footprint.footprint(job.stages[stage], schedule, job.world_size)

    def propose(self, job: Job) -> Proposal:
        """The default, and caps of many sizes."""
        capped = (DistributedDataParallelStrategy(bucket_cap_mb=cap) for cap in CAPS_MB)
        return Proposal.within((DistributedDataParallelStrategy(), *capped), bound_of(job, "all-reduce"))

    def wrap(
        self, module: nn.Module, strategy: DistributedDataParallelStrategy, **ddp_options: Any
    ) -> nn.Module:
        from headway.strategies.data_parallel.ddp import runtime

        return runtime.wrap(module, strategy, **ddp_options)

    @property
    def injection(self) -> Injection[DistributedDataParallelStrategy]:
        return _Injection()

    def recognise(self, wrapped: nn.Module) -> InForce | None:
        from headway.strategies.data_parallel.ddp import runtime

        return runtime.in_force(wrapped)


class _Injection(Injection[DistributedDataParallelStrategy]):
    def construct(
        self,
        init: Callable[..., None],
        wrapped: DistributedDataParallel,
        module: nn.Module,
        given: dict[str, Any],
        strategy: DistributedDataParallelStrategy,
    ) -> None:
        from headway.strategies.data_parallel.ddp import runtime

        init(wrapped, module, **{**given, **runtime.options(strategy)})
        runtime.take_over(wrapped, strategy, given)


PLUGIN = _Plugin()
