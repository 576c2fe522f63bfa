"""The strategy plug-in of partial all-reduce."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from headway.collectives.algorithms import NCCL
from headway.errors import UnsupportedError
from headway.job import Job
from headway.model import ModelSpec
from headway.permission import ASYNCHRONOUS
from headway.scheduling.groups import CoordinatedGroups, GroupSchedule
from headway.strategies.footprint import Footprint
from headway.strategies.horizon import Outcome
from headway.strategies.injection import Injection
from headway.strategies.partial_all_reduce.host_wrapper import HostDataParallel
from headway.strategies.partial_all_reduce.policy import STATIC, PartialAllReduceStrategy
from headway.strategies.partial_all_reduce.runtime import PartialAllReduce
from headway.strategies.partial_all_reduce.scheduled_coordinator import ScheduledCoordinator
from headway.strategies.plugin import InForce, Proposal, StrategyPlugin

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer

    from headway.graph.build import GraphBuilder
    from headway.graph.step_layout import StepLayout


def in_force(wrapped: Any) -> InForce | None:
    """Return the options of a wrapped model as far as the wrapper knows them; None for other models.

    A wrapper without a plan does not know the group generator of its coordinator.
    """
    if isinstance(wrapped, HostDataParallel) and wrapped.worker is not None:
        return InForce(wrapped.strategy.model_dump(mode="json", exclude_defaults=True))
    if not isinstance(wrapped, PartialAllReduce):
        return None
    planned = getattr(wrapped, "strategy", None)
    if isinstance(planned, PartialAllReduceStrategy):
        return InForce(planned.model_dump(mode="json", exclude_defaults=True))
    options: dict[str, Any] = {
        "staleness": wrapped._averaging.staleness,
        "moments": wrapped._policies["moments"],
    }
    if isinstance(wrapped.coordinator, ScheduledCoordinator):
        options["groups"] = STATIC
    return InForce(options)


SIZES = (2, 4, 8)  # of groups
STALENESS: tuple[Literal[0, 1], ...] = (0, 1)
LATENESS_THRESHOLD = 1.0  # equal ranks never lag this much, but one twice as slow as its host does
MOST_RANKS = 256  # the time of a simulation is proportional to the number of ranks


def proposal(job: Job) -> Proposal:
    """Propose a few plans: first-come groups of several sizes, static groups, groups across hosts, and pairs.

    There is no bound.
    """
    if job.world_size < 2:
        return Proposal()
    if why := _why_not(job):
        return Proposal(note=f"partial all-reduce was not considered: {why}", about_permitted=ASYNCHRONOUS)
    strategy_of = PartialAllReduceStrategy
    sizes = [size for size in SIZES if size < job.world_size] or [2]
    strategies = [
        strategy_of(group_size=size, staleness=staleness) for size in sizes for staleness in STALENESS
    ]
    strategies += [
        strategy_of(groups=STATIC, staleness=staleness).spelled_out(job) for staleness in STALENESS
    ]
    hosts = job.on.hosts
    if len(hosts) > 1 and any(host.workers > 1 for host in hosts):
        strategies += [
            strategy_of(groups="inter-intra", lateness_threshold=LATENESS_THRESHOLD, staleness=staleness)
            for staleness in STALENESS
        ]
        together = [
            strategy_of(groups=STATIC, within_hosts="all-reduce", staleness=staleness)
            for staleness in STALENESS
        ]
        strategies += [strategy.spelled_out(job) for strategy in together]
        if len(hosts) > 2:
            strategies.append(strategy_of(within_hosts="all-reduce", group_size=2, staleness=1))
    if job.world_size > 2:
        strategies.append(strategy_of(groups="pairs", staleness=1))
    return Proposal(tuple(strategies))


def _why_not(job: Job) -> str:
    if refusal := job.refusals.get(PartialAllReduceStrategy.name):
        return refusal
    if job.world_size > MOST_RANKS:
        return f"{job.world_size} ranks, but a search simulates at most {MOST_RANKS} asynchronous ranks"
    return ""


def averaged_bytes(model: ModelSpec, strategy: PartialAllReduceStrategy | None) -> int:
    """Bytes that a group averages: parameters, and optimizer state if ``moments`` are averaged."""
    moments = strategy is not None and strategy.moments == "averaged"
    return model.size_bytes + (model.optimizer_state_bytes or 0) * moments


def footprint(model: ModelSpec, staleness: int, ddp_bytes: int = 0) -> Footprint:
    """Memory of one rank; with staleness, it includes the parameters with which its group began.

    ``ddp_bytes`` are the buckets of ranks that all-reduce within hosts; the result then is for the first rank of a host.
    The copy of averaged moments is not counted, since a schedule does not include ``moments``.
    """
    return Footprint(
        buffers_bytes=model.size_bytes * (1 + staleness) + ddp_bytes,
        state_bytes=model.optimizer_state_bytes or 0,
        gradients_apart=True,
        updated_share=1.0,
    )


BY_GLOO = "groups average on the CPU over Gloo connections, not NCCL; costs and rates measured for NCCL may not apply"


class _Plugin(StrategyPlugin[PartialAllReduceStrategy]):
    policy = PartialAllReduceStrategy
    simulates_incidents = True

    def reactions(self, graph: GraphBuilder[Any], job: Job, strategy: PartialAllReduceStrategy) -> StepLayout:
        """Raise UnsupportedError: ranks have no common steps, and ``over_a_horizon`` simulates them."""
        raise UnsupportedError(
            "partial all-reduce has no common steps",
            expected="a simulation over a time horizon",
            fix="Use headway replay --plan, or headway predict --strategy.",
        )

    def over_a_horizon(self, job: Job, strategy: PartialAllReduceStrategy) -> Outcome:
        from headway.strategies.partial_all_reduce.horizon import over_a_horizon

        return over_a_horizon(job, strategy)

    def carried_out_by(
        self, strategy: PartialAllReduceStrategy, library: str
    ) -> tuple[PartialAllReduceStrategy, Sequence[str]]:
        return strategy, (BY_GLOO,) if library == NCCL else ()

    def propose(self, job: Job) -> Proposal:
        """Propose a few generators, sizes and staleness values, for users who permit plans that change training."""
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
        from headway.strategies.partial_all_reduce.meeting import coordinator

        return nullcontext({}) if strategy.is_static else coordinator(strategy)

    def wrappers(self) -> tuple[type[nn.Module], ...]:
        from headway.strategies.partial_all_reduce.host_wrapper import HostDataParallel
        from headway.strategies.partial_all_reduce.runtime import PartialAllReduce

        return PartialAllReduce, HostDataParallel

    def recognise(self, wrapped: Any) -> InForce | None:

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
        ddp_options: dict[str, Any],
        strategy: PartialAllReduceStrategy,
    ) -> None:
        import torch.distributed as dist

        init(wrapped, module, **ddp_options, strategy=strategy)
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
