"""A plan for unmodified scripts: their own ``DistributedDataParallel(model, ...)`` gives the planned runtime.

The class itself is changed rather than the name ``DistributedDataParallel``, so that it does not matter how and when a
script imported it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway.errors import UnsupportedError
from headway.plan import Plan
from headway.scheduling.buckets import BucketSchedule
from headway.strategies.data_parallel.ddp import runtime as ddp_runtime
from headway.strategies.data_parallel.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.data_parallel.decoupled.policy import DecoupledStrategy
from headway.strategies.data_parallel.module_spec import model_spec
from headway.strategies.data_parallel.parameter_server.policy import ParameterServerStrategy
from headway.strategies.loading import driver
from headway.strategies.parallelize import check

_stock_init: Callable[..., None] = DistributedDataParallel.__init__
_stock_compile: Callable[..., Any] = torch.compile
_stock_signature = inspect.signature(_stock_init)
_plan: Plan | None = None


def install(plan: Plan) -> None:
    """From now on every ``DistributedDataParallel(model, ...)`` of this process follows ``plan``.

    The call raises PlanError where the model or the number of workers is not the plan's.

    Raises UnsupportedError for a strategy that can only be had with ``headway.parallelize``.
    """
    global _plan  # noqa: PLW0603 - the class that is changed is the process's too
    driver(plan.strategy, "runtime")  # what cannot be imported should say so now
    if not isinstance(
        plan.strategy, DistributedDataParallelStrategy | DecoupledStrategy | ParameterServerStrategy
    ):
        raise UnsupportedError(
            "an unmodified script cannot follow this plan's strategy", got=plan.strategy.name,
            fix="Call headway.parallelize in the script.",
        )  # fmt: skip
    _plan = plan
    torch.compile = _compile
    DistributedDataParallel.__new__ = _planned_new  # type: ignore[method-assign]
    DistributedDataParallel.__init__ = _planned_init  # type: ignore[method-assign]


def uninstall() -> None:
    """Leave ``DistributedDataParallel`` as stock again."""
    global _plan  # noqa: PLW0603 - as above
    _plan = None
    torch.compile = _stock_compile
    DistributedDataParallel.__init__ = _stock_init  # type: ignore[method-assign]
    # __new__ stays: with no plan it does what object's does, and CPython does not undo its assignment cleanly.


@functools.wraps(_stock_compile)
def _compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
    decoupled = _plan is not None and isinstance(_plan.strategy, DecoupledStrategy)
    if decoupled and isinstance(model, driver(DecoupledStrategy(), "runtime").DecoupledDataParallel):
        model.compile()  # says why not
    return _stock_compile(model, *args, **kwargs)


def _planned_new(cls: type[Any], *_args: Any, **_kwargs: Any) -> Any:
    if _plan is None or not isinstance(_plan.strategy, DecoupledStrategy):
        return object.__new__(cls)
    planned_class = driver(_plan.strategy, "runtime").DecoupledDataParallel
    if cls is DistributedDataParallel:
        wrapped = object.__new__(planned_class)  # Python goes on with planned_class.__init__
        wrapped.__dict__["planned_schedule"] = functools.partial(_schedule, _plan)
        wrapped.__dict__["planned_tune"] = _plan.strategy.tune
        return wrapped
    if not issubclass(cls, planned_class):
        raise UnsupportedError(
            "a subclass of DistributedDataParallel cannot follow this plan", got=cls.__qualname__,
            fix="Use DistributedDataParallel itself, or run without the plan.",
        )  # fmt: skip
    return object.__new__(cls)


def _schedule(plan: Plan, module: nn.Module, process_group: Any) -> BucketSchedule:
    check(plan, module, process_group)
    return plan.strategy.decide(model_spec(module))


@functools.wraps(_stock_init)
def _planned_init(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    strategy = None if _plan is None else _plan.strategy
    if _plan is None or not isinstance(strategy, DistributedDataParallelStrategy | ParameterServerStrategy):
        _stock_init(self, module, *args, **kwargs)
        return
    # What the script gave by position must give way too.
    given = dict(_stock_signature.bind(self, module, *args, **kwargs).arguments)
    del given["self"], given["module"]
    check(_plan, module, given.get("process_group"))
    if isinstance(strategy, DistributedDataParallelStrategy):
        _stock_init(self, module, **{**given, **ddp_runtime.options(strategy)})
        return
    runtime = driver(strategy, "runtime")
    runtime.check_module(module)
    _stock_init(self, module, **{**given, **runtime.options(strategy)})
    runtime.serve(self, strategy)
