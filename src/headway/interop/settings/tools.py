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


def _with_passes(tool: str, settings: Settings, request: SettingsRequest) -> Settings:
    """Add the plan's passes to a strategy's own settings, in a file of their own, if ``tool`` is torch."""
    in_script = torch_code(request.plan.passes) if tool in IN_TORCH else None
    unsupported = None if in_script is None else in_script.lacks
    lacks = (*settings.lacks, *ddp.of_pipeline(request), *unexpressed(request, unsupported))
    if in_script is None or not in_script.code:
        return replace(settings, lacks=lacks)
    gist = ", ".join(in_script.gists)
    first = f" Call prepare() of {PASSES_FILE} on the model before that." if in_script.prepares else ""
    text = python_file(gist, in_script.lacks, in_script.imports + in_script.code)
    return replace(
        settings,
        gist=f"{settings.gist}, {gist}",
        use=settings.use + first + in_script.use + (f" They are in {PASSES_FILE}." if in_script.use else ""),
        lacks=lacks,
        files={**settings.files, PASSES_FILE: text},
    )


IN_TORCH = ("ddp", "fsdp2")
"""Those that run what passes are in Python."""
PASSES_FILE = "passes_settings.py"
OF_COLLECTIVES = ("nccl", "rccl")
"""The tools with options for collectives."""
