"""The tools that plans can be printed for, by the name that the command line knows them by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from headway.interop.settings import ddp, deepspeed, fsdp2, megatron, nccl
from headway.interop.settings.asked import Asked, unexpressed
from headway.interop.settings.python_passes import in_torch, python_file
from headway.job import Job
from headway.strategies.registry import plugin_of
from headway.tool_settings import Settings

TOOLS: dict[str, Callable[[Asked], Settings]] = {
    "ddp": ddp.settings,
    "fsdp2": fsdp2.settings,
    "deepspeed": deepspeed.settings,
    "megatron": megatron.settings,
    "nccl": nccl.nccl,
    "rccl": nccl.rccl,
}
"""Each raises PlanError for a plan that its tool has nothing for."""


def settings_for(tool: str, asked: Asked) -> Settings:
    """What was asked as settings of ``tool``: as the strategy along data has it, or as the tool's file does.

    Raises PlanError where there are none.
    """
    strategy = asked.data
    if strategy is not None:
        job = Job(asked.stages, asked.replicas) if asked.stages else None
        found = plugin_of(strategy).settings_for(tool, strategy, job)
        if found is not None:
            return _with_passes(tool, found, asked)
    return TOOLS[tool](asked)


def _with_passes(tool: str, found: Settings, asked: Asked) -> Settings:
    """What a strategy itself made of a plan, with its passes in a file of their own, where the tool is torch's."""
    told = in_torch(asked.plan.passes) if tool in IN_TORCH else None
    of_passes = None if told is None else told.lacks
    lacks = (*found.lacks, *ddp.of_pipeline(asked), *unexpressed(asked, of_passes))
    if told is None or not told.code:
        return replace(found, lacks=lacks)
    gist = ", ".join(told.gists)
    first = f" Call prepare() of {PASSES_FILE} on the model before that." if told.prepares else ""
    return replace(
        found,
        gist=f"{found.gist}, {gist}",
        use=found.use + first + told.use + (f" They are in {PASSES_FILE}." if told.use else ""),
        lacks=lacks,
        files={**found.files, PASSES_FILE: python_file(gist, told.lacks, told.imports + told.code)},
    )


IN_TORCH = ("ddp", "fsdp2")
"""Those that run what passes are in Python."""
PASSES_FILE = "passes_settings.py"
OF_COLLECTIVES = ("nccl", "rccl")
"""Those that know the options of collectives."""
