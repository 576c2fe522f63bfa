"""Partial all-reduce as a strategy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from headway.errors import UnsupportedError
from headway.job import Job
from headway.scheduling.groups import CoordinatedGroups, GroupSchedule
from headway.strategies.footprint import Footprint
from headway.strategies.horizon import Outcome
from headway.strategies.injection import Injection
from headway.strategies.partial_all_reduce.candidates import proposal
from headway.strategies.partial_all_reduce.footprint import footprint
from headway.strategies.partial_all_reduce.policy import PartialAllReduceStrategy
from headway.strategies.plugin import InForce, Proposal, StrategyPlugin

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer

    from headway.graph.build import GraphBuilder
    from headway.graph.step_layout import StepLayout


class _Plugin(StrategyPlugin[PartialAllReduceStrategy]):
    policy = PartialAllReduceStrategy
    simulates_incidents = True

    def reactions(self, graph: GraphBuilder[Any], job: Job, strategy: PartialAllReduceStrategy) -> StepLayout:
        """Ranks do not take their steps together, so none are laid out: ``over_a_horizon`` simulates them."""
        raise UnsupportedError(
            "partial all-reduce has no steps that all ranks finish",
            expected="a simulation over a time",
            fix="Use headway replay --plan, or headway predict --strategy.",
        )

    def over_a_horizon(self, job: Job, strategy: PartialAllReduceStrategy) -> Outcome:
        from headway.strategies.partial_all_reduce.horizon import over_a_horizon

        return over_a_horizon(job, strategy)

    def propose(self, job: Job) -> Proposal:
        """A handful of generators, sizes and staleness, for users who permit plans that change what is trained."""
        return proposal(job)

    def footprint(self, job: Job, schedule: GroupSchedule | CoordinatedGroups, stage: int) -> Footprint:
        of_hosts = 1 < schedule.world_size < job.world_size
        ddp_bytes = job.stages[stage].size_bytes if of_hosts else 0
        return footprint(job.stages[stage], getattr(schedule, "staleness", 1), ddp_bytes)

    def messages(self, schedule: Any, world_size: int, library: str) -> int:
        return 1

    def wrap(self, module: nn.Module, strategy: PartialAllReduceStrategy, **ddp_options: Any) -> nn.Module:
        return _wrapper(strategy)(module, strategy=strategy, **ddp_options)  # type: ignore[call-arg]

    def updated_by(self, wrapped: nn.Module, optimizer: Optimizer) -> None:
        from headway.strategies.partial_all_reduce.host_wrapper import HostDataParallel
        from headway.strategies.partial_all_reduce.wrapper import PartialDataParallel

        if isinstance(wrapped, PartialDataParallel | HostDataParallel):
            wrapped.updated_by(optimizer)

    def finish(self, wrapped: nn.Module, timeout_s: float) -> tuple[int, ...] | None:
        from headway.strategies.partial_all_reduce.host_wrapper import HostDataParallel
        from headway.strategies.partial_all_reduce.runtime import PartialAllReduce

        if isinstance(wrapped, HostDataParallel):
            return wrapped.hosts.ranks_of(wrapped.finish(timeout_s=timeout_s).workers)
        if not isinstance(wrapped, PartialAllReduce):
            return None
        return wrapped.finish(timeout_s=timeout_s).workers

    @property
    def injection(self) -> Injection[PartialAllReduceStrategy]:
        return _Injection()

    def launched_with(self, strategy: PartialAllReduceStrategy) -> AbstractContextManager[Mapping[str, str]]:
        from headway.strategies.partial_all_reduce.launching import coordinator

        return nullcontext({}) if strategy.is_static else coordinator(strategy)

    def wrappers(self) -> tuple[type[nn.Module], ...]:
        from headway.strategies.partial_all_reduce.host_wrapper import HostDataParallel
        from headway.strategies.partial_all_reduce.runtime import PartialAllReduce

        return PartialAllReduce, HostDataParallel

    def recognise(self, wrapped: Any) -> InForce | None:
        from headway.strategies.partial_all_reduce.recognising import in_force

        return in_force(wrapped)


class _Injection(Injection[PartialAllReduceStrategy]):
    def wrapper(self) -> type[DistributedDataParallel]:
        from headway.strategies.partial_all_reduce.wrapper import PartialDataParallel

        return PartialDataParallel

    def wrapper_under(self, strategy: PartialAllReduceStrategy) -> type[DistributedDataParallel]:
        return _wrapper(strategy)

    def construct(
        self,
        init: Callable[..., None],
        wrapped: DistributedDataParallel,
        module: nn.Module,
        given: dict[str, Any],
        strategy: PartialAllReduceStrategy,
    ) -> None:
        import torch.distributed as dist

        init(wrapped, module, **given, strategy=strategy)
        if dist.get_rank() == 0:
            whose = "hosts'" if strategy.within_hosts else "ranks'"
            print(
                f"headway: {strategy.describe()}: {whose} models differ until headway.finish(model)",
                file=sys.stderr,
            )


def _wrapper(strategy: PartialAllReduceStrategy) -> type[DistributedDataParallel]:
    if strategy.within_hosts:
        from headway.strategies.partial_all_reduce.host_wrapper import HostDataParallel

        return HostDataParallel
    from headway.strategies.partial_all_reduce.wrapper import PartialDataParallel

    return PartialDataParallel


PLUGIN = _Plugin()
