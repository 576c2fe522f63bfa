"""Checks that a plan fits a job, and adapts its strategy to another number of workers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

from headway.plan import Plan
from headway.strategies.base import Strategy
from headway.strategies.decisions import Entry, Journal
from headway.strategies.registry import plugin_of
from headway.units import counted

if TYPE_CHECKING:
    from torch import nn


def check(plan: Plan, model: nn.Module, process_group: Any = None) -> None:
    """Raise PlanError unless ``plan`` holds for ``model`` and for the size of ``process_group``."""
    import torch.distributed as dist

    from headway.strategies.live.module_spec import model_spec

    workers = dist.get_world_size(process_group)
    holds = _for_workers(plan, workers) is not None
    plan.check(model_spec(model), plan.world_size if holds else workers)


def strategy_for(plan: Plan, model: nn.Module, process_group: Any = None) -> Strategy:
    """The strategy by which ``plan`` trains ``model`` on ``process_group``.

    A plan that adapts also holds for other numbers of workers, as in an elastic job after a failure: its schedule is
    then retuned, and rank 0 says so. Raises PlanError for another model, and for another number of workers if the plan
    does not adapt.
    """
    import torch.distributed as dist

    check(plan, model, process_group)
    workers = dist.get_world_size(process_group)
    retuned = _for_workers(plan, workers)
    if retuned is None:
        return plan.strategy
    if dist.get_rank(process_group) == 0:
        why = (
            f"the plan is for {counted(plan.world_size, 'worker')}, and the job has {workers}: "
            "retuning its schedule"
        )
        before, order = plan.strategy.describe(), retuned.describe()
        journal = Journal.wanted()
        if journal is not None:
            journal.add(Entry(step=0, before=before, order=order, reason=why, measured_ms=0.0))
        if journal is None or not journal.prints:
            print(f"headway: {why}", file=sys.stderr)
    return retuned


def _for_workers(plan: Plan, workers: int) -> Strategy | None:
    """The strategy of an adaptive plan for another number of workers; None for all other plans and for its own number."""
    if workers == plan.world_size:
        return None
    return cast("Strategy | None", plugin_of(plan.strategy).for_workers(plan.strategy))
