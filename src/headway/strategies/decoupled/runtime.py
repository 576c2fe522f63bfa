"""The decoupled all-reduce, live."""

from __future__ import annotations

import inspect
from typing import Any, cast

from torch import nn

from headway.errors import UserError
from headway.job import Job
from headway.strategies.decoupled.checks import check_module, refuse_options
from headway.strategies.decoupled.policy import DecoupledStrategy, options_of
from headway.strategies.decoupled.wrapper import DecoupledDataParallel
from headway.strategies.live.module_spec import model_spec
from headway.strategies.plugin import InForce

__all__ = ["DecoupledDataParallel", "in_force", "live_options", "refusal", "unseen", "wrap"]


def wrap(module: nn.Module, strategy: DecoupledStrategy, **ddp_options: Any) -> DecoupledDataParallel:
    """Wrap ``module`` as ``strategy`` decides. ``ddp_options`` are arguments of DistributedDataParallel.

    Raises PlanError where the strategy does not fit the module, UnsupportedError and UserError as
    ``DecoupledDataParallel`` does.
    """
    return DecoupledDataParallel(module, **live_options(strategy, module), **ddp_options)


def unseen(module: nn.Module, strategy: DecoupledStrategy, **ddp_options: Any) -> DecoupledDataParallel:
    """As ``wrap``, but told to nobody who watches or replaces what scripts wrap."""
    wrapped = object.__new__(DecoupledDataParallel)
    init = inspect.unwrap(DecoupledDataParallel.__init__)
    init(wrapped, module, **live_options(strategy, module), **ddp_options)
    return wrapped


def live_options(strategy: DecoupledStrategy, module: nn.Module) -> dict[str, Any]:
    """The arguments of DecoupledDataParallel that ``strategy`` decides for ``module``.

    Raises PlanError where the strategy does not fit the module.
    """
    return {"schedule": strategy.decide(Job.of(model_spec(module)))}


def in_force(wrapped: nn.Module) -> InForce | None:
    """What a decoupled model does now, after whatever its optimizer made of its plan."""
    if not isinstance(wrapped, DecoupledDataParallel):
        return None
    # The engine's, which an optimizer may have had gather gradients after all.
    schedule = wrapped.schedule if wrapped.engine is None else wrapped.engine.schedule
    buckets = tuple(bucket.parameters for bucket in schedule.buckets)
    return InForce(options_of(schedule, model_spec(wrapped.module)), buckets)


def refusal(wrapped: nn.Module, *, compiled_around: bool) -> str:
    """Why the decoupled all-reduce would refuse to take the place of a model's wrapper; "" where it would not.

    ``compiled_around`` says that code was compiled which calls the wrapper.
    """
    if isinstance(wrapped, DecoupledDataParallel):
        return ""
    if compiled_around:
        return "the model was compiled after it was wrapped"
    try:
        check_module(cast("nn.Module", wrapped.module))
        refuse_options(
            static_graph=getattr(wrapped, "static_graph", False),
            mixed_precision=getattr(wrapped, "mixed_precision", None),
        )
    except UserError as refusal:
        return str(refusal).partition(". ")[0]
    return ""
