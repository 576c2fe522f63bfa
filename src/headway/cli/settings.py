"""``headway settings``: a plan for who cannot run it, as settings of other tools."""

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
    "--for", "tool", type=click.Choice(NAMES), required=True, help="The tool that is to run the plan."
)
@click.option(
    "--trace", "trace_path", type=click.Path(path_type=Path),
    help="The recording that the plan was made from, where it is no longer where it was: some tools count elements or "
    "name modules.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write the files into this folder, which is made."
)
@click.option(
    "--as-replayed", is_flag=True,
    help="nccl, rccl: also fix to rings what the plan leaves to the library, where a replay takes rings for it.",
)  # fmt: skip
@click.option(
    "--channels", type=click.IntRange(1, 64),
    help="nccl: write a tuner's table, whose rules name so many channels. rccl: name them.",
)  # fmt: skip
@click.option(
    "--append", type=click.Path(path_type=Path),
    help="nccl with --channels, rccl: a tuner's table whose rules are kept behind the plan's own.",
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
    """Print PLAN as settings of another tool, and say what of it the tool cannot do."""
    from headway.interop.settings.tools import settings_for
    from headway.plan import Plan

    if output is not None:
        files.check_absent(output)
    plan = Plan.load(plan_path)
    options = _of_collectives(tool, as_replayed, channels, append)
    found = settings_for(tool, _asked(plan, trace_path, options))
    if tool == "ddp" and plan.is_recorded:
        found = _of_recorded(found, plan, keeps_files=output is not None)
    if output is not None:
        _write(found, output)
    if as_json:
        written = {} if output is None else {"path": str(output)}
        output_of.print_document("settings", {**found.to_document(), **written})
        return
    _say(found, output)


def _of_recorded(found: Settings, plan: Plan, *, keeps_files: bool) -> Settings:
    """DDP's settings for the plan that was recorded, which change nothing where the script itself trained so."""
    from headway.strategies.ddp.policy import DistributedDataParallelStrategy

    if plan.strategy == DistributedDataParallelStrategy() and not plan.passes:
        kept = found.files if keeps_files else {}
        return replace(found, use="Nothing to change: this is what was recorded.", files=kept)
    use = f"This is what was recorded: there is something to change only where headway run applied it. {found.use}"
    return replace(found, use=use)


def _of_collectives(
    tool: str, as_replayed: bool, channels: int | None, append: Path | None
) -> CollectiveOptions:
    """What was asked of collectives. Raises UserError where the tool chooses none, or has no table to append to."""
    from headway.interop.settings.request import CollectiveOptions
    from headway.interop.settings.tools import OF_COLLECTIVES
    from headway.interop.settings.tuner_table import read_table

    given = {"--as-replayed": as_replayed, "--channels": channels is not None, "--append": append is not None}
    unknown = [name for name, is_given in given.items() if is_given]
    if unknown and tool not in OF_COLLECTIVES:
        raise UserError(
            f"{' and '.join(unknown)}: not for {tool}", expected=f"--for {' or '.join(OF_COLLECTIVES)}"
        )
    if append is not None and tool == "nccl" and channels is None:
        raise UserError("--append without a table to append to", expected="--channels too, for nccl")
    appended = () if append is None else read_table(append)
    return CollectiveOptions(channels, appended, as_replayed)


def _asked(plan: Plan, trace_path: Path | None, options: CollectiveOptions) -> SettingsRequest:
    """The plan and the models of its trace, which it remembers. Raises PlanError where the trace is of another job."""
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


def _write(found: Settings, folder: Path) -> None:
    """Write the files into a new folder: all of them or none."""
    if not found.files:
        raise PlanError(
            f"{found.tool} takes no files for this plan", got=f"-o {folder}", expected="arguments or variables alone",
            fix="Leave out -o.",
        )  # fmt: skip
    with files.folder_written_whole(folder) as unfinished:
        for name, text in found.files.items():
            files.write_text(unfinished / name, text)


def _say(found: Settings, folder: Path | None) -> None:
    console = output_of.console()
    console.print(one_line(found.sentence()))
    for lack in found.lacks:
        console.print(f"Left out: {lack}.")
    for caution in found.cautions:
        console.print(f"Note: {caution}.")
    console.print(found.use)
    if found.environment:
        console.print("\n".join(f"export {name}='{value}'" for name, value in found.environment.items()))
    if found.arguments:
        console.print(" ".join(found.arguments))
    for name, text in found.files.items():
        if folder is None:
            console.print(f"\n# --- {name} ---\n{text}", end="")
    if folder is not None:
        console.print("Wrote " + ", ".join(str(folder / name) for name in found.files) + ".")
