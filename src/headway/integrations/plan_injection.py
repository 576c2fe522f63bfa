"""A plan for unmodified scripts: their own ``DistributedDataParallel(model, ...)`` gives the planned runtime.

The class itself is changed rather than the name ``DistributedDataParallel``, so that it does not matter how and when a
script imported it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from headway.errors import PlanError, UnsupportedError, UserError
from headway.integrations.followable import check_followable
from headway.integrations.parallelize import check
from headway.plan import Plan
from headway.scheduling.buckets import BucketSchedule
from headway.strategies.data_parallel.ddp import runtime as ddp_runtime
from headway.strategies.data_parallel.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.data_parallel.decoupled.policy import DecoupledStrategy
from headway.strategies.data_parallel.module_spec import model_spec
from headway.strategies.data_parallel.parameter_server.policy import ParameterServerStrategy
from headway.strategies.loading import driver
from headway.torch_private import sharded_by_fully_shard
from headway.units import format_bytes

_stock_init: Callable[..., None] = DistributedDataParallel.__init__
_stock_compile: Callable[..., Any] = torch.compile
_stock_signature = inspect.signature(_stock_init)
_plan: Plan | None = None
_followed = False  # whether a model has been wrapped as the plan says
_on_refusal: Callable[[UserError], object] | None = None
_step_hook: RemovableHandle | None = None


def install(plan: Plan, on_refusal: Callable[[UserError], object] | None = None) -> None:
    """From now on ``DistributedDataParallel(model, ...)`` of the plan's model follows ``plan`` in this process.

    The call raises PlanError where the number of workers is not the plan's. Other models stay stock, and rank 0 says
    so. Where no model has followed the plan when one of them is first called, that raises PlanError; so does the first
    step of an optimizer whose model is sharded with ``fully_shard``. ``on_refusal`` is called with what these two
    raise, for a script may catch it.

    Raises UnsupportedError for a strategy that can only be had with ``headway.parallelize``.
    """
    global _plan, _followed, _on_refusal, _step_hook  # noqa: PLW0603 - the class that is changed is the process's too
    driver(plan.strategy, "runtime")  # what cannot be imported should say so now
    check_followable(plan)
    _plan, _followed, _on_refusal = plan, False, on_refusal
    torch.compile = _compile
    if _step_hook is None:
        _step_hook = register_optimizer_step_pre_hook(_refuse_fully_sharded)
    DistributedDataParallel.__new__ = _planned_new  # type: ignore[method-assign]
    DistributedDataParallel.__init__ = _planned_init  # type: ignore[method-assign]


def _tell(error: UserError) -> None:
    if _on_refusal is not None:
        _on_refusal(error)


def followed() -> bool:
    """Whether a model has been wrapped as the installed plan says."""
    return _followed


def uninstall() -> None:
    """Leave ``DistributedDataParallel`` as stock again."""
    global _plan, _step_hook  # noqa: PLW0603 - as above
    _plan = None
    if _step_hook is not None:
        _step_hook.remove()
        _step_hook = None
    torch.compile = _stock_compile
    DistributedDataParallel.__init__ = _stock_init  # type: ignore[method-assign]
    # __new__ stays: with no plan it does what object's does, and CPython does not undo its assignment cleanly.


@functools.wraps(_stock_compile)
def _compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
    decoupled = _plan is not None and isinstance(_plan.strategy, DecoupledStrategy)
    if decoupled and isinstance(model, driver(DecoupledStrategy(), "runtime").DecoupledDataParallel):
        model.compile()  # says why not
    return _stock_compile(model, *args, **kwargs)


def _planned_new(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    if _plan is None or not isinstance(_plan.strategy, DecoupledStrategy):
        return object.__new__(cls)
    model = kwargs.get("module", args[0] if args else None)
    if isinstance(model, nn.Module) and not _is_planned(_plan, model):
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


def _is_planned(plan: Plan, module: nn.Module) -> bool:
    return model_spec(module).fingerprint == plan.model.fingerprint


def _stays_stock(plan: Plan, wrapped: DistributedDataParallel) -> None:
    """See when ``wrapped`` is first called, and so all models have been wrapped, whether one follows ``plan``."""
    module = wrapped.module

    def first_call(_wrapped: nn.Module, _inputs: Any) -> None:
        handle.remove()
        if not _followed:
            try:
                check(plan, module)
            except UserError as error:
                _tell(error)
                raise error.with_traceback(None) from None
        if dist.get_rank() == 0:
            which = f"{type(module).__name__} ({format_bytes(model_spec(module).size_bytes)})"
            print(
                f"headway: the plan is for another model: {which} stays with stock DistributedDataParallel",
                file=sys.stderr,
            )

    handle = wrapped.register_forward_pre_hook(first_call)


def _refuse_fully_sharded(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    if not _followed and sharded_by_fully_shard():
        error = PlanError(
            "a plan cannot be followed", got="a model that is sharded with fully_shard (FSDP2)",
            expected="a job that constructs DistributedDataParallel", fix="Run it without the plan.",
        )  # fmt: skip
        _tell(error)
        raise error


def _schedule(plan: Plan, module: nn.Module, process_group: Any) -> BucketSchedule:
    global _followed  # noqa: PLW0603 - as above
    check(plan, module, process_group)
    _followed = True
    return plan.strategy.decide(model_spec(module))


@functools.wraps(_stock_init)
def _planned_init(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    global _followed  # noqa: PLW0603 - as above
    strategy = None if _plan is None else _plan.strategy
    if _plan is None:
        _stock_init(self, module, *args, **kwargs)
        return
    if not _is_planned(_plan, module):
        _stock_init(self, module, *args, **kwargs)
        _stays_stock(_plan, self)
        return
    assert isinstance(strategy, DistributedDataParallelStrategy | ParameterServerStrategy)
    # What the script gave by position must give way too.
    given = dict(_stock_signature.bind(self, module, *args, **kwargs).arguments)
    del given["self"], given["module"]
    check(_plan, module, given.get("process_group"))
    _followed = True
    if isinstance(strategy, DistributedDataParallelStrategy):
        _stock_init(self, module, **{**given, **ddp_runtime.options(strategy)})
        ddp_runtime.keep_compiled_parts(self, given)
        return
    runtime = driver(strategy, "runtime")
    runtime.check_module(module)
    _stock_init(self, module, **{**given, **runtime.options(strategy)})
    ddp_runtime.keep_compiled_parts(self, given)
    runtime.serve(self, strategy)
