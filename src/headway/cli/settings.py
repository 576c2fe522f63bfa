"""``headway settings``: export a plan as settings for other tools."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headway import files
from headway.cli import output as output_of
from headway.errors import PlanError, UserError, one_line

if TYPE_CHECKING:
    from headway.interop.settings.request import CollectiveOptions, SettingsRequest
    from headway.plan import Plan
    from headway.tool_settings import Settings

NAMES = ("ddp", "fsdp2", "deepspeed", "megatron", "nccl", "rccl")


@click.command("settings")
@click.argument("plan_path", metavar="PLAN", type=click.Path(path_type=Path))
@click.option(
    "--for", "tool", type=click.Choice(NAMES), required=True, help="The tool to write settings for."
)
@click.option(
    "--trace", "trace_path", type=click.Path(path_type=Path),
    help="The recording that the plan was made from, if it has moved: some settings count elements or name "
    "modules.",
)  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the files into this new folder.")
@click.option(
    "--as-replayed", is_flag=True,
    help="nccl, rccl: also force rings where the plan leaves the choice to the library and replay assumes rings.",
)  # fmt: skip
@click.option(
    "--channels", type=click.IntRange(1, 64),
    help="nccl: write a tuner table with this number of channels in its rules. rccl: add it to the rules.",
)  # fmt: skip
@click.option(
    "--append", type=click.Path(path_type=Path),
    help="rccl, or nccl with --channels: append the rules of this tuner table to the plan's.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def settings(
    plan_path: Path,
    tool: str,
    trace_path: Path | None,
    output: Path | None,
    as_replayed: bool,
    channels: int | None,
    append: Path | None,
    as_json: bool,
) -> None:
    """Print PLAN as settings for another tool, and list what that tool cannot do."""
    from headway.interop.settings.tools import settings_for
    from headway.plan import Plan

    if output is not None:
        files.check_absent(output)
    plan = Plan.load(plan_path)
    options = _collective_options(tool, as_replayed, channels, append)
    tool_settings = settings_for(tool, _request(plan, trace_path, options))
    if tool == "ddp" and plan.is_recorded:
        tool_settings = _for_recorded_plan(tool_settings, plan, keeps_files=output is not None)
    if output is not None:
        _write(tool_settings, output)
    if as_json:
        written = {} if output is None else {"path": str(output)}
        output_of.print_document("settings", {**tool_settings.to_document(), **written})
        return
    _say(tool_settings, output)


def _for_recorded_plan(tool_settings: Settings, plan: Plan, *, keeps_files: bool) -> Settings:
    """DDP's settings for the recorded plan: nothing to change, unless headway run applied it while recording."""
    from headway.strategies.registry import stock

    if plan.strategy == stock() and not plan.passes:
        kept = tool_settings.files if keeps_files else {}
        return replace(tool_settings, use="Nothing to change: this is what was recorded.", files=kept)
    when = "change something only if headway run applied it while recording"
    use = f"This is what was recorded: {when}. {tool_settings.use}"
    return replace(tool_settings, use=use)


def _collective_options(
    tool: str, as_replayed: bool, channels: int | None, append: Path | None
) -> CollectiveOptions:
    """The options for collectives. Raises UserError if the tool has none, or no table to append to."""
    from headway.interop.settings.request import CollectiveOptions
    from headway.interop.settings.tools import OF_COLLECTIVES
    from headway.interop.settings.tuner_table import read_table

    options = {
        "--as-replayed": as_replayed,
        "--channels": channels is not None,
        "--append": append is not None,
    }
    unknown = [name for name, is_set in options.items() if is_set]
    if unknown and tool not in OF_COLLECTIVES:
        raise UserError(
            f"{' and '.join(unknown)} cannot be used with --for {tool}",
            expected=f"--for {' or '.join(OF_COLLECTIVES)}",
        )
    if append is not None and tool == "nccl" and channels is None:
        raise UserError("--append needs a table to append to", expected="--channels too, for nccl")
    appended = () if append is None else read_table(append)
    return CollectiveOptions(channels, appended, as_replayed)


def _request(plan: Plan, trace_path: Path | None, options: CollectiveOptions) -> SettingsRequest:
    """The plan and the models of its trace. Raises PlanError if the trace is of another job."""
    from headway.interop.settings.request import SettingsRequest
    from headway.trace.folder import load_trace

    path = trace_path or plan.trace
    if path is None:
        return SettingsRequest(plan, collectives=options)
    try:
        trace = load_trace(path)
        plan.check_recorded(trace.model, trace.stages, trace.world_size)
    except UserError as error:
        if trace_path is not None:
            raise
        return SettingsRequest(plan, (), options, f"a plan whose trace is lost ({one_line(str(error), 150)})")
    return SettingsRequest(plan, tuple(trace.stages) or (trace.model,), options)


def _write(tool_settings: Settings, folder: Path) -> None:
    """Write the files into a new folder: all or none."""
    if not tool_settings.files:
        raise PlanError(
            f"{tool_settings.tool} needs no files for this plan", got=f"-o {folder}",
            expected="arguments or variables only", fix="Remove -o.",
        )  # fmt: skip
    with files.folder_written_whole(folder) as unfinished:
        for name, text in tool_settings.files.items():
            files.write_text(unfinished / name, text)


def _say(tool_settings: Settings, folder: Path | None) -> None:
    console = output_of.console()
    console.print(one_line(tool_settings.sentence()))
    for lack in tool_settings.lacks:
        console.print(f"Left out: {lack}.")
    for caution in tool_settings.cautions:
        console.print(f"Note: {caution}.")
    console.print(tool_settings.use)
    if tool_settings.environment:
        console.print(
            "\n".join(f"export {name}='{value}'" for name, value in tool_settings.environment.items())
        )
    if tool_settings.arguments:
        console.print(" ".join(tool_settings.arguments))
    for name, text in tool_settings.files.items():
        if folder is None:
            console.print(f"\n# --- {name} ---\n{text}", end="")
    if folder is not None:
        console.print("Wrote " + ", ".join(str(folder / name) for name in tool_settings.files) + ".")
