"""Decides which plans an unmodified script can follow. Needs no torch, so launchers refuse before starting a command."""

from __future__ import annotations

from typing import Any

from headway.errors import UnsupportedError
from headway.plan import Plan
from headway.strategies.injection import Injection, ScheduleInjection
from headway.strategies.registry import plugin_of


def injection_of(plan: Plan) -> Injection[Any] | ScheduleInjection[Any]:
    """How the script's own wrapper or pipeline schedule is replaced by the plan's.

    Raises UnsupportedError if only ``headway.parallelize`` can apply the plan.
    """
    plugin = plugin_of(plan.strategy)
    injection = plugin.injection or plugin.schedule_injection
    if injection is None:
        raise UnsupportedError(
            "an unmodified script cannot follow this plan's strategy", got=plan.strategy.name,
            fix="Call headway.parallelize in the script.",
        )  # fmt: skip
    return injection
