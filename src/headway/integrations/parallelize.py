"""``headway.parallelize``: wrap a model as a plan says, or as it turns out while training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.errors import UnsupportedError, UserError
from headway.plan import Plan
from headway.strategies.registry import WITHOUT_A_PLAN, plugin_of

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def parallelize(
    model: nn.Module, optimizer: Optimizer, plan: Plan | None = None, **ddp_options: Any
) -> nn.Module:
    """Wrap ``model`` for data-parallel training as ``plan`` says; ``optimizer`` is noticed at its first step.

    Without a plan the all-reduce is decoupled, and its schedule is tuned during the first steps.

    The result takes the place of ``DistributedDataParallel(model, **ddp_options)``; the script goes on as it would with
    that. Call it on every rank, after ``torch.distributed.init_process_group``.

    Raises PlanError where the plan was made for another model or number of workers, UnsupportedError where the model,
    the optimizer or an option would train wrongly, UserError where there is no process group.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    if not dist.is_available() or not dist.is_initialized():
        raise UserError(
            "there is no process group", expected="torch.distributed to be initialised",
            fix="Call torch.distributed.init_process_group first, under torchrun.",
        )  # fmt: skip
    if isinstance(model, DistributedDataParallel):
        raise UnsupportedError(
            "the model is already wrapped", got=type(model).__name__, fix="Pass its .module."
        )
    strategy = WITHOUT_A_PLAN
    if plan is not None:
        check(plan, model, ddp_options.get("process_group"))
        strategy = plan.strategy
        for each in plan.passes:
            model = each.apply(model, optimizer)
    return plugin_of(strategy).wrap(model, strategy, **ddp_options)


def check(plan: Plan, model: nn.Module, process_group: Any = None) -> None:
    """Raise PlanError unless ``plan`` was made for ``model`` and for the size of ``process_group``."""
    import torch.distributed as dist

    from headway.strategies.data_parallel.module_spec import model_spec

    plan.check(model_spec(model), dist.get_world_size(process_group))
