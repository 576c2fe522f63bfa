"""Applies a plan to unmodified scripts with pipelines: their own schedules follow the planned order."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from headway.errors import PlanError, UserError
from headway.plan import Plan
from headway.strategies.injection import ScheduleInjection
from headway.strategies.live.module_spec import model_spec
from headway.torch_private import pipelining
from headway.units import format_bytes

_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_bytes(device: torch.device) -> int | None:
    """The total memory of ``device``, or None if unknown."""
    if device.type == "cuda":
        total_bytes: int = torch.cuda.get_device_properties(device).total_memory
        return total_bytes
    try:
        total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    try:
        limit = _GROUP_LIMIT.read_text().strip()
    except OSError:
        limit = ""
    return min(total_bytes, int(limit)) if limit.isdigit() else total_bytes


_undo: list[Callable[[], None]] = []


def install(
    plan: Plan,
    injection: ScheduleInjection[Any],
    on_refusal: Callable[[UserError], object] | None = None,
    on_applied: Callable[[], object] | None = None,
) -> None:
    """Make schedules of ``torch.distributed.pipelining`` follow ``plan`` in this process.

    A schedule's first step raises PlanError, before any computation, if its stages are not the plan's. ``on_refusal``
    is called with the error too, since the script may catch it; ``on_applied`` is called when a schedule follows.
    """
    uninstall()

    def take_over(steps: pipelining.PipelineSteps) -> None:
        try:
            for index, module in steps.modules.items():
                inner = module.module if isinstance(module, DistributedDataParallel) else module
                plan.check_stage(model_spec(inner), index, steps.stage_count, dist.get_world_size())
            check_memory(plan, steps.device)
            injection.take_over(steps, plan.strategy)
        except UserError as error:
            if on_refusal is not None:
                on_refusal(error)
            raise error.with_traceback(None) from None
        if on_applied is not None:
            on_applied()

    _undo.append(pipelining.before_first_step(take_over))


def check_memory(plan: Plan, device: torch.device) -> None:
    """Raise PlanError if a rank is predicted to need more than the total memory of ``device``."""
    needed_bytes = plan.prediction.peak_bytes if plan.prediction is not None else None
    there_bytes = memory_bytes(device)
    if needed_bytes is not None and there_bytes is not None and needed_bytes > there_bytes:
        raise PlanError(
            "the plan needs more memory than a rank has",
            got=f"a predicted peak of {format_bytes(needed_bytes)}", expected=f"at most {format_bytes(there_bytes)}",
            fix="Plan again with headway optimize --memory-limit.",
        )  # fmt: skip


def uninstall() -> None:
    """Stop changing schedules that are constructed from now on."""
    while _undo:
        _undo.pop()()
