"""The tools that plans can be printed for, by the name that the command line knows them by."""

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
"""Each raises PlanError for a plan that its tool has nothing for."""


def settings_for(tool: str, asked: SettingsRequest) -> Settings:
    """What was asked as settings of ``tool``: as the strategy along data has it, or as the tool's file does.

    Raises PlanError where there are none.
    """
    strategy = asked.data
    if strategy is not None and asked.pipeline is None:
        job = Job(asked.stages, asked.replicas) if asked.stages else None
        found = plugin_of(strategy).settings_for(tool, strategy, job)
        if found is not None:
            return replace(found, lacks=(*found.lacks, *unexpressed(asked)))
    return TOOLS[tool](asked)


OF_COLLECTIVES = ("nccl", "rccl")
"""Those that know the options of collectives."""
