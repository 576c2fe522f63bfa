"""Adaptive training as a strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headway.job import Job
from headway.scheduling.buckets import BucketSchedule
from headway.strategies.adaptive.policy import HOME, AdaptiveStrategy, of_earlier_format
from headway.strategies.base import Strategy
from headway.strategies.footprint import Footprint
from headway.strategies.injection import Injection
from headway.strategies.plugin import StrategyPlugin
from headway.strategies.registry import carried_out_by, plugin_named, plugin_of

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from headway.graph.build import GraphBuilder
    from headway.graph.step_layout import StepLayout


class _Plugin(StrategyPlugin[AdaptiveStrategy]):
    """In replay a job is what it begins as."""

    policy = AdaptiveStrategy

    def as_run(self, strategy: AdaptiveStrategy, job: Job) -> Strategy:
        return plugin_of(strategy.begin_as).as_run(strategy.begin_as, job)

    def carried_out_by(
        self, strategy: AdaptiveStrategy, library: str
    ) -> tuple[AdaptiveStrategy, Sequence[str]]:
        changes: dict[str, Strategy] = {}
        notes: list[str] = []
        for option in ("begin_as", "search_from"):
            planned = getattr(strategy, option)
            if planned is not None:
                changes[option], ignored = carried_out_by(planned, library)
                notes += [f"{option}: {note}" for note in ignored]
        return (strategy.model_copy(update=changes), notes) if notes else (strategy, ())

    def reactions(
        self, graph: GraphBuilder[BucketSchedule], job: Job, strategy: AdaptiveStrategy
    ) -> StepLayout:
        return plugin_of(strategy.begin_as).reactions(graph, job, strategy.begin_as)

    def footprint(self, job: Job, schedule: BucketSchedule, stage: int) -> Footprint:
        return plugin_named(HOME).footprint(job, schedule, stage)

    def of_earlier_format(self, name: str, options: Any) -> tuple[str, Any] | None:
        return of_earlier_format(name, options)

    def adapting(self, strategy: Strategy) -> AdaptiveStrategy | None:
        if isinstance(strategy, AdaptiveStrategy):
            return strategy.model_copy(update={"adapt": True})
        # What it would change to sends gradients as they are.
        if strategy.permissions:
            return None
        if strategy.name == HOME or plugin_of(strategy).on_stock_ddp(strategy) is not None:
            return AdaptiveStrategy(begin_as=strategy, tune=False, adapt=True)
        return None

    def for_workers(self, strategy: AdaptiveStrategy) -> AdaptiveStrategy | None:
        if not strategy.adapt:
            return None
        changes: dict[str, object] = {"begin_as": _for_any_workers(strategy.begin_as), "tune": True}
        if strategy.search_from is not None:
            changes["search_from"] = _for_any_workers(strategy.search_from)
        return strategy.model_copy(update=changes)

    def wrap(self, module: nn.Module, strategy: AdaptiveStrategy, **ddp_options: Any) -> nn.Module:
        from headway.strategies.adaptive.wrapper import AdaptiveDataParallel

        return AdaptiveDataParallel(module, strategy=strategy, **ddp_options)

    @property
    def injection(self) -> Injection[AdaptiveStrategy]:
        return _Injection()

    def wrappers(self) -> tuple[type[nn.Module], ...]:
        from headway.strategies.adaptive.wrapper import AdaptiveDataParallel

        return (AdaptiveDataParallel,)


def _for_any_workers(strategy: Strategy) -> Strategy:
    changed: Strategy = plugin_of(strategy).for_any_workers(strategy)
    return changed


class _Injection(Injection[AdaptiveStrategy]):
    def wrapper(self) -> type[DistributedDataParallel]:
        from headway.strategies.adaptive.wrapper import AdaptiveDataParallel

        return AdaptiveDataParallel

    def construct(
        self,
        init: Callable[..., None],
        wrapped: DistributedDataParallel,
        module: nn.Module,
        given: dict[str, Any],
        strategy: AdaptiveStrategy,
    ) -> None:
        init(wrapped, module, strategy=strategy, **given)


PLUGIN = _Plugin()
