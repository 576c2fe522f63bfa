"""Runs a rank under a plan: applies it, refuses to step without it, and reports step times."""

from __future__ import annotations

import atexit
import functools
import itertools
import multiprocessing
import multiprocessing.util
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway.errors import LaunchError, UserError
from headway.integrations import pipeline_injection, plan_injection, reports
from headway.integrations.activate import leave_refusal
from headway.integrations.followable import injection_of
from headway.integrations.short_runs import WARM_UP_STEPS
from headway.plan import Plan
from headway.recording.step_clock import StepClock
from headway.strategies.injection import ScheduleInjection
from headway.torch_private.optimizers import after_every_step, before_every_step

TIMED_STEPS = 1000  # at most: the last ones
PAUSE = 5.0  # times the median: a longer step contains something else, such as an evaluation
TELL_EVERY_NS = 10 * 10**9


def follow(plan_path: str) -> None:
    """Make this rank follow the plan, or refuse to step an optimizer without it.

    Raises PlanError if the plan cannot be read, and UnsupportedError if a script cannot follow it.
    """
    plan = Plan.load(plan_path)
    injection = injection_of(plan)
    meter = StepMeter(with_pauses=plan.strategy.counts_steps) if dist.get_rank() == 0 else None
    if meter is not None:
        meter.attach()
    if isinstance(injection, ScheduleInjection):
        pipeline_injection.install(plan, injection, leave_refusal, _applied)
        _refuse_to_step_without(
            "any schedule of torch.distributed.pipelining had run a step",
            "a script that trains with torch.distributed.pipelining",
            "Run it without the plan, or call headway.parallelize with it in the script.",
        )
        return
    plan_injection.install(plan, leave_refusal)
    _leave_refusals_of(DistributedDataParallel, "__new__", meter)
    _leave_refusals_of(DistributedDataParallel, "__init__", meter)
    if (wrapper := injection.wrapper_under(plan.strategy)) is not None:
        _leave_refusals_of(wrapper, "__init__", meter)
    if dist.get_world_size() > 1:
        _refuse_to_step_without(
            "any DistributedDataParallel of the plan's model was constructed",
            "a script that wraps its model in DistributedDataParallel",
            "Run it without the plan, or call headway.parallelize in it.",
        )


def _applied() -> None:
    if not reports.reported("applied"):
        reports.update(applied=True)


def _leave_refusals_of(wrapper: type, name: str, meter: StepMeter | None) -> None:
    """Report refusals to the launcher where they are raised, since the script may catch or hide them."""
    original: Callable[..., Any] = getattr(wrapper, name)

    @functools.wraps(original)
    def construct(*args: Any, **kwargs: Any) -> Any:
        try:
            result = original(*args, **kwargs)
        except UserError as error:
            leave_refusal(error)
            raise error.with_traceback(None) from None  # keep Headway's frames out of the script's log
        if plan_injection.followed() and not reports.reported("applied"):
            if meter is not None and isinstance(model := getattr(args[0], "module", None), nn.Module):
                meter.model_is(model)
            _applied()
        return result

    setattr(wrapper, name, construct)


def _refuse_to_step_without(what: str, expected: str, fix: str) -> None:
    owner = os.getpid()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if reports.reported("applied") or os.getpid() != owner:
            return
        error = LaunchError(
            "the plan was not applied",
            got=f"an optimizer step on rank {dist.get_rank() if dist.is_initialized() else '?'} "
            f"before {what}",
            expected=expected,
            fix=fix,
        )
        leave_refusal(error)
        raise error

    before_every_step(before_step)


class StepMeter:
    """Times this rank's steps and reports them, so that the launcher can print the step time at the end.

    A step costs one clock read. ``with_pauses``: the strategy makes a few steps much longer, so these count too.
    """

    def __init__(self, *, with_pauses: bool) -> None:
        self._with_pauses = with_pauses
        self._process = os.getpid()
        self._clock = StepClock()
        self._ends_ns: deque[int] = deque(maxlen=TIMED_STEPS + 1)
        self._steps = 0
        self._tell_at_step = 1
        self._tell_at_ns = 0

    def attach(self) -> None:
        """Begin."""
        reports.update(began_s=time.time())
        after_every_step(self._stepped)
        atexit.register(self.tell)
        if multiprocessing.parent_process() is not None:  # such processes end without Python's exit handlers
            multiprocessing.util.Finalize(None, self.tell, exitpriority=0)

    def model_is(self, model: nn.Module) -> None:
        """Count the steps of this model's optimizer."""
        self._clock.model_is(model)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        now_ns = time.monotonic_ns()
        if os.getpid() != self._process or not self._clock.counts(optimizer):
            return
        self._steps += 1
        if self._steps >= WARM_UP_STEPS:
            self._ends_ns.append(now_ns)
        # A process may be killed at any time, so it reports early, and then at intervals.
        if self._steps >= self._tell_at_step or now_ns >= self._tell_at_ns:
            self._tell_at_step, self._tell_at_ns = 2 * self._steps, now_ns + TELL_EVERY_NS
            self.tell()

    def tell(self) -> None:
        """Report the steps so far."""
        if os.getpid() != self._process or not self._steps:
            return
        lengths_ms = [(end - begin) / 1e6 for begin, end in itertools.pairwise(self._ends_ns)]
        if lengths_ms and not self._with_pauses:
            longest_ms = PAUSE * statistics.median(lengths_ms)
            lengths_ms = [length for length in lengths_ms if length <= longest_ms]
        reports.update(
            steps=self._steps,
            timed_steps=len(lengths_ms),
            step_ms=statistics.fmean(lengths_ms) if lengths_ms else 0.0,
            spread_ms=statistics.pstdev(lengths_ms) if lengths_ms else 0.0,
        )
