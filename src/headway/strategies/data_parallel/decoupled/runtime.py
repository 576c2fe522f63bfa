"""The decoupled all-reduce, live."""

from __future__ import annotations

from typing import Any

from torch import nn

from headway.strategies.data_parallel.decoupled.policy import DecoupledStrategy
from headway.strategies.data_parallel.decoupled.wrapper import DecoupledDataParallel
from headway.strategies.data_parallel.module_spec import model_spec

__all__ = ["DecoupledDataParallel", "wrap"]


def wrap(module: nn.Module, strategy: DecoupledStrategy, **ddp_options: Any) -> DecoupledDataParallel:
    """Wrap ``module`` as ``strategy`` decides. ``ddp_options`` are arguments of DistributedDataParallel.

    Raises PlanError where the strategy does not fit the module, UnsupportedError and UserError as
    ``DecoupledDataParallel`` does.
    """
    schedule = strategy.decide(model_spec(module))
    return DecoupledDataParallel(module, schedule=schedule, tune=strategy.tune, **ddp_options)
