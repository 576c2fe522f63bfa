"""``headway record``: run an unmodified command and record its ranks."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headway import files
from headway.cli import output as output_of
from headway.cli.output import trailing_command
from headway.errors import LaunchError, TraceError, UserError, one_line
from headway.integrations.launch import CommandOutcome, injected_environment, run_command
from headway.integrations.reports import Report
from headway.units import counted

if TYPE_CHECKING:
    from headway.recording.place import Recording
    from headway.trace.format import Trace

FIRST_STEP, LAST_STEP = 5, 25
OUTCOME_WITHIN_S = 120.0  # after the command's end, for another launcher to assemble the trace
REPORTS = "reports"  # in the staging folder, for ranks on hosts that share it


def parse_steps(text: str) -> tuple[int, int]:
    """Read ``A:B``: record optimizer steps A to B-1, counted from 0; A is at least 1, which leaves out start-up."""
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) < int(last)):
        raise UserError(
            "--steps cannot be read",
            got=repr(text),
            expected="A:B with 1 <= A < B",
            fix="For example: --steps 5:25.",
        )
    return int(first), int(last)


@click.command(options_metavar="[OPTIONS] -- COMMAND")
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
    help="Record optimizer steps A to B-1, counted from 0; earlier steps are warm-up.",
)
@click.option(
    "--detail",
    type=click.Choice(["modules", "operators", "kernels"]),
    default="modules",
    show_default=True,
    help="Level of detail: modules is cheap; operators and kernels use torch.profiler.",
)
@click.option(
    "--no-clock-server",
    is_flag=True,
    help="Do not open a port on rank 0 to synchronise clocks: align them by collectives.",
)
@click.option(
    "--no-measuring",
    is_flag=True,
    help="Do not pause the job after the last recorded step (10 s to a minute) to measure links and cores.",
)
@click.option(
    "--json", "as_json", is_flag=True,
    help="Print one JSON document on stdout; the output of COMMAND goes to stderr.",
)  # fmt: skip
@click.pass_context
def record(
    ctx: click.Context,
    output: Path,
    steps: str,
    detail: str,
    no_clock_server: bool,
    no_measuring: bool,
    as_json: bool,
) -> None:
    """Run COMMAND and record its ranks.

    headway record -o trace -- torchrun --nproc-per-node 2 train.py
    """
    command = trailing_command(ctx)
    first_step, stop_step = parse_steps(steps)
    files.check_absent(output, TraceError)
    with _staging(output.absolute()) as staging:
        options = files.dump_json(
            {
                "folder": str(staging),
                "output": str(output.absolute()),
                "first_step": first_step,
                "stop_step": stop_step,
                "clock_server": not no_clock_server,
                "measure": not no_measuring,
                "detail": detail,
            }
        )
        warning = _NothingRecordedWarning()
        ended = run_command(
            command, injected_environment(os.environ, record=options), staging / REPORTS, warning.look,
            output=sys.stderr.buffer if as_json else None,
        )  # fmt: skip
        written = _finish(staging, output, ended, command)
    if written:
        if ended.interrupted_by and not no_measuring:
            _print_interrupted(output)
        _announce(output, as_json)
    if ended.interrupted_by or not written:
        ctx.exit(ended.exit_status)
    if ended.status != 0:
        raise LaunchError(
            f"the command failed with status {ended.status}; {output} contains the steps up to then"
        )


@contextmanager
def _staging(output: Path) -> Iterator[Path]:
    """A private folder next to ``output``; folders of crashed launchers on this host are removed."""
    with ExitStack() as kept:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            stem = f".{output.name}.recording.{socket.gethostname()}."
            staging = kept.enter_context(files.temporary_folder(stem, output.parent))
            staging.chmod(0o755)  # as other folders are
            (staging / REPORTS).mkdir()
        except OSError as failure:
            raise TraceError(
                f"{output} cannot be written", got=failure.strerror, fix="Check its folder."
            ) from None
        yield staging


class _NothingRecordedWarning:
    """Warns once, while the command runs, that nothing is being recorded, and why."""

    def __init__(self) -> None:
        self._printed = False

    def look(self, reports: tuple[Report, ...]) -> None:
        if self._printed or any(report.rank >= 0 for report in reports):
            return
        why = next((f"{report.blind}; install it there" for report in reports if report.blind), "") or next(
            (
                f"process {report.pid} trains without a process group; start it with torchrun, and have it call "
                "init_process_group"
                for report in reports
                if report.alone
            ),
            "",
        )
        if why:
            self._printed = True
            print(f"headway: nothing is being recorded: {why}", file=sys.stderr, flush=True)


def _finish(staging: Path, output: Path, ended: CommandOutcome, command: tuple[str, ...]) -> bool:
    """Assemble the trace if this launcher has rank 0, else say where it is. Returns whether it was written here.

    Raises LaunchError if nothing was recorded; if Headway was interrupted, prints a line instead.
    """
    from headway.recording.finish import finish_recording
    from headway.recording.place import recording_elsewhere

    status = ended.exit_status
    other_place = recording_elsewhere(staging)
    if other_place is not None:
        print(f"headway: {_outcome(*other_place)}", file=sys.stderr)
        return False
    try:
        finish_recording(staging, output, None, wait_s=_patience_s(ended), incomplete=True, command=command)
    except LaunchError as nothing:
        if ended.interrupted_by:
            print("headway: interrupted before anything was recorded", file=sys.stderr)
            return False
        if status == 0:
            raise nothing from None
        raise LaunchError(
            f"the command failed with status {status} before anything was recorded",
            expected="a job that trains",
            fix="See the command's own messages above.",
        ) from None
    return True


def _patience_s(ended: CommandOutcome) -> float:
    """How long to wait for rank files after the command's end: other launchers' ranks may still be writing."""
    if ended.exit_status == 0:
        return 60
    ranks = [report for report in ended.reports if report.rank >= 0]
    return 10 if any(report.world_size > len(ranks) for report in ranks) else 0


def _outcome(recording: Recording, shared: bool) -> str:
    """The outcome of a recording that another launcher (that of rank 0) assembles."""
    output = one_line(str(recording.output))
    host = one_line(recording.host)
    if not shared:
        sent = f"this host's ranks sent their files over the job's store to rank 0 on {host}"
        return f"{sent}, whose launcher writes {output}"
    deadline = time.monotonic() + OUTCOME_WITHIN_S
    while (assembling := recording.folder.parent.exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    if assembling:
        return f"rank 0's launcher on {host} has not written {output} yet"
    if recording.output is not None and (recording.output / "manifest.json").is_file():
        return f"rank 0's launcher on {host} wrote {output}"
    return f"rank 0's launcher on {host} wrote no trace; its own messages say why"


def _ranks(trace: Trace) -> str:
    recorded = len(trace.events)
    return (
        counted(recorded, "rank")
        if recorded == trace.world_size
        else f"{recorded} of {trace.world_size} ranks"
    )


def _print_interrupted(output: Path) -> None:
    """Say how much an interrupted recording contains, unless it is complete."""
    from headway.trace.folder import CLUSTER, load_trace

    if not (output / CLUSTER).exists():
        kept = counted(len(load_trace(output).steps), "step")
        print(f"headway: interrupted; {kept} recorded, links and cores not measured", file=sys.stderr)


def _announce(output: Path, as_json: bool) -> None:
    from headway.trace.folder import load_trace

    trace = load_trace(output)
    for note in trace.manifest.notes:
        print(f"headway: {note}", file=sys.stderr)
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
        f"Recorded {len(trace.steps)} steps of {_ranks(trace)} in {output} "
        f"({count} events, {size_bytes / 1000:.0f} kB, {size_bytes / cells / 1000:.1f} kB per rank and step). "
        f"Next: headway diagnose {output}"
    )
