"""The tools that plans can be exported for, by their names on the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from headway.interop.settings import ddp, deepspeed, fsdp2, megatron, nccl
from headway.interop.settings.python_passes import python_file, torch_code
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
    if strategy is not None:
        job = Job(request.stages, request.replicas) if request.stages else None
        settings = plugin_of(strategy).settings_for(tool, strategy, job)
        if settings is not None:
            return _with_passes(tool, settings, request)
    return TOOLS[tool](request)


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
"""The tools with options for collectives."""
