"""``headway record``: run an unmodified command and record its ranks."""

from __future__ import annotations

import os
from pathlib import Path

import click

from headway import files
from headway.cli import output as output_of
from headway.cli.command import trailing_command
from headway.errors import LaunchError, TraceError, UserError
from headway.integrations.launch import injected_environment, run_command

FIRST_STEP, LAST_STEP = 5, 25


def parse_steps(text: str) -> tuple[int, int]:
    """Read ``A:B``: record optimizer steps A to B-1, counted from 0; A of at least 1 leaves out start-up."""
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) < int(last)):
        raise UserError(
            "--steps cannot be read",
            got=repr(text),
            expected="A:B with 1 <= A < B",
            fix="For example --steps 5:25.",
        )
    return int(first), int(last)


@click.command()
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("trace"),
    show_default=True,
    help="The folder to write the trace to.",
)
@click.option(
    "--steps",
    default=f"{FIRST_STEP}:{LAST_STEP}",
    show_default=True,
    metavar="A:B",
    help="Record optimizer steps A to B-1; the steps before warm up.",
)
@click.option(
    "--detail",
    type=click.Choice(["modules", "operators", "kernels"]),
    default="modules",
    show_default=True,
    help="How finely: modules is cheap; operators and a device's kernels are seen through torch.profiler.",
)
@click.option(
    "--no-clock-server",
    is_flag=True,
    help="Open no port on rank 0 to compare clocks with: they are told from what ranks do together.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def record(
    ctx: click.Context, output: Path, steps: str, detail: str, no_clock_server: bool, as_json: bool
) -> None:
    """Run the command after -- and record it: headway record -o DIR -- torchrun --nproc-per-node 2 train.py."""
    command = trailing_command(ctx)
    first_step, last_step = parse_steps(steps)
    files.check_absent(output, TraceError)
    # Started once a rank (as the lab does), every rank records into the same place and rank 0 assembles.
    rank = os.environ.get("RANK")
    staging = output.absolute().parent / f".{output.name}.recording"
    if rank in (None, "0"):
        files.remove_folder(staging)
    try:
        staging.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise TraceError(
            f"{output} cannot be written", got=failure.strerror, fix="Check its folder."
        ) from None
    options = files.dump_json(
        {
            "folder": str(staging),
            "first_step": first_step,
            "last_step": last_step,
            "clock_server": not no_clock_server,
            "detail": detail,
        }
    )
    try:
        status = run_command(command, injected_environment(os.environ, record=options))
    except BaseException:
        files.remove_folder(staging)
        raise
    if rank not in (None, "0"):
        ctx.exit(status)
    _finish(staging, output, status)
    _announce(output, as_json)
    if status != 0:
        raise LaunchError(
            f"the command failed with status {status} after its recorded steps; {output} was written"
        )


def _finish(staging: Path, output: Path, status: int) -> None:
    from headway.trace.record.finish import finish_recording

    world_size = os.environ.get("WORLD_SIZE") if os.environ.get("RANK") else None
    try:
        finish_recording(staging, output, int(world_size) if world_size else None, wait_s=0 if status else 60)
    except LaunchError:
        if status == 0:
            raise
        raise LaunchError(
            f"the command failed with status {status} before anything was recorded",
            expected="a job that trains",
            fix="Its own messages are above.",
        ) from None


def _announce(output: Path, as_json: bool) -> None:
    from headway.trace.folder import load_trace

    trace = load_trace(output)
    size_bytes = sum(path.stat().st_size for path in output.iterdir())
    count = sum(len(events) for events in trace.events.values())
    cells = trace.world_size * len(trace.steps)
    if as_json:
        output_of.print_document(
            "recording",
            {
                "trace": str(output),
                "world_size": trace.world_size,
                "steps": list(trace.steps),
                "events": count,
                "size_bytes": size_bytes,
                "bytes_per_rank_step": size_bytes / cells,
            },
        )
        return
    click.echo(
        f"Recorded {len(trace.steps)} steps of {trace.world_size} ranks in {output} "
        f"({count} events, {size_bytes / 1000:.0f} kB, {size_bytes / cells / 1000:.1f} kB a rank and step). "
        f"Next: headway diagnose {output}"
    )
