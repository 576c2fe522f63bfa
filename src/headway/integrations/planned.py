"""A rank under a plan: whether it constructed what the plan says before it steps, and what becomes of refusals."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from headway.errors import LaunchError, UserError
from headway.integrations import pipeline_injection, plan_injection, reports
from headway.integrations.activate import leave_refusal
from headway.integrations.followable import injection_of
from headway.plan import Plan
from headway.strategies.injection import ScheduleInjection
from headway.torch_private.step_hooks import before_every_step


def follow(plan_path: str) -> None:
    """Have this rank follow the plan, or refuse to step an optimizer without it.

    Raises PlanError where the plan cannot be read and UnsupportedError where a script cannot follow it.
    """
    plan = Plan.load(plan_path)
    injection = injection_of(plan)
    if isinstance(injection, ScheduleInjection):
        pipeline_injection.install(plan, injection, leave_refusal, _applied)
        _refuse_to_step_without(
            "any schedule of torch.distributed.pipelining had run a step",
            "a script that trains with torch.distributed.pipelining",
            "Run it without the plan, or call headway.parallelize with it in the script.",
        )
        return
    plan_injection.install(plan, leave_refusal)
    _leave_refusals_of(DistributedDataParallel, "__new__")
    _leave_refusals_of(DistributedDataParallel, "__init__")
    if (wrapper := injection.wrapper_under(plan.strategy)) is not None:
        _leave_refusals_of(wrapper, "__init__")
    if dist.get_world_size() > 1:
        _refuse_to_step_without(
            "any DistributedDataParallel of the plan's model was constructed",
            "a script that wraps its model in DistributedDataParallel",
            "Run it without the plan, or call headway.parallelize in it.",
        )


def _applied() -> None:
    if not reports.said("applied"):
        reports.say(applied=True)


def _leave_refusals_of(wrapper: type, name: str) -> None:
    """Tell the launcher of refusals where they are raised: a script may catch them, or have its own excepthook."""
    original: Callable[..., Any] = getattr(wrapper, name)

    @functools.wraps(original)
    def construct(*args: Any, **kwargs: Any) -> Any:
        try:
            result = original(*args, **kwargs)
        except UserError as error:
            leave_refusal(error)
            raise error.with_traceback(None) from None  # of Headway's insides the script's log needs nothing
        if plan_injection.followed():
            _applied()
        return result

    setattr(wrapper, name, construct)


def _refuse_to_step_without(what: str, expected: str, fix: str) -> None:
    owner = os.getpid()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if reports.said("applied") or os.getpid() != owner:
            return
        error = LaunchError(
            "the plan was not applied",
            got=f"an optimizer's step on rank {dist.get_rank() if dist.is_initialized() else '?'} "
            f"before {what}",
            expected=expected,
            fix=fix,
        )
        leave_refusal(error)
        raise error

    before_every_step(before_step)
