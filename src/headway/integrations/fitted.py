"""Whether a plan fits a job, and what becomes of it where that has another number of workers."""

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
    """What ``plan`` has ``model`` trained under on ``process_group``.

    One that adapts holds for other numbers of workers than the plan's, as an elastic job has after a death: it is tuned
    anew there, and the first rank says so. Raises PlanError for another model, and where any other plan was made for
    another number of workers.
    """
    import torch.distributed as dist

    check(plan, model, process_group)
    workers = dist.get_world_size(process_group)
    found = _for_workers(plan, workers)
    if found is None:
        return plan.strategy
    if dist.get_rank(process_group) == 0:
        why = (
            f"the plan is for {counted(plan.world_size, 'worker')}, and the job has {workers}: "
            "its schedule is tuned anew"
        )
        before, order = plan.strategy.describe(), found.describe()
        journal = Journal.wanted()
        if journal is not None:
            journal.add(Entry(step=0, before=before, order=order, reason=why, measured_ms=0.0))
        if journal is None or not journal.prints:
            print(f"headway: {why}", file=sys.stderr)
    return found


def _for_workers(plan: Plan, workers: int) -> Strategy | None:
    """What a plan that adapts is for another number of workers than it was made for; None for all else."""
    if workers == plan.world_size:
        return None
    return cast("Strategy | None", plugin_of(plan.strategy).for_workers(plan.strategy))
