"""The tools that plans can be exported for, by their names on the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from headway.interop.settings import ddp, deepspeed, fsdp2, megatron, nccl
from headway.interop.settings.request import SettingsRequest, unexpressed
from headway.job import Job
from headway.strategies.registry import plugin_of
from headway.tool_settings import Settings

TOOLS: dict[str, Callable[[SettingsRequest], Settings]] = {
    "ddp": ddp.settings,
    "fsdp2": fsdp2.settings,
    "deepspeed": deepspeed.settings,
    "megatron": megatron.settings,
    "nccl": nccl.nccl,
    "rccl": nccl.rccl,
}
"""Each raises PlanError if its tool has no equivalent of the plan."""


def settings_for(tool: str, request: SettingsRequest) -> Settings:
    """Export the requested plan as settings of ``tool``, by the data strategy's own exporter or the tool's.

    Raises PlanError if the tool has no equivalent of the plan.
    """
    strategy = request.data
    if strategy is not None and request.pipeline is None:
        job = Job(request.stages, request.replicas) if request.stages else None
        settings = plugin_of(strategy).settings_for(tool, strategy, job)
        if settings is not None:
            return replace(settings, lacks=(*settings.lacks, *unexpressed(request)))
    return TOOLS[tool](request)


OF_COLLECTIVES = ("nccl", "rccl")
"""The tools with options for collectives."""
