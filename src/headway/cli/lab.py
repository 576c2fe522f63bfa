"""``headway lab``: run commands on a cluster emulated on this machine."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast, get_args

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway import files
from headway.cli.output import trailing_command
from headway.errors import LabError
from headway.lab import state
from headway.lab.launch import DEFAULT_GRACE_S, MODES, Mode, run
from headway.lab.spec import EVENT_FORM, LabSpec, SlowBy, load_spec, override, parse_event, parse_pairs
from headway.units import parse_duration_s


@click.group()
def lab() -> None:
    """Emulate a cluster on this machine: shaped links, slow workers, failures."""


@lab.command("run")
@click.argument("spec", required=False, metavar="[SPEC] -- COMMAND", type=click.Path(path_type=Path))
@click.option("--hosts", type=int, help="Number of hosts.")
@click.option("--workers-per-host", type=int, help="Ranks on each host.")
@click.option("--rate", metavar="RATE", help="The rate of every link in both directions, such as 400mbit.")
@click.option("--up", metavar="RATE", help="The rate of every link out of its host.")
@click.option("--down", metavar="RATE", help="The rate of every link into its host.")
@click.option("--slow", metavar="RANK=SHARE", multiple=True, help="Limit a rank to this share of the time.")
@click.option(
    "--slow-by",
    type=click.Choice(get_args(SlowBy)),
    help="How to slow ranks: by CPU quota or by stopping them; auto, the default, uses quotas if permitted.",
)
@click.option(
    "--pace",
    metavar="RANK=FACTOR",
    multiple=True,
    help="Multiply the times of a rank's emulated device by this factor.",
)
@click.option(
    "--at",
    "events",
    metavar='"TIME EVENT"',
    multiple=True,
    help=f"A change while the job runs: {EVENT_FORM}.",
)
@click.option(
    "--mode", type=click.Choice(MODES), default="auto", show_default=True, help="How to isolate hosts."
)
@click.option(
    "--grace",
    metavar="TIME",
    default=f"{DEFAULT_GRACE_S:g}s",
    show_default=True,
    help="How long other ranks may continue after one fails, and how long they may then take to exit.",
)
@click.option("--timeout", metavar="TIME", help="Stop the ranks after this time, with exit status 124.")
@click.option("--no-prefix", is_flag=True, help="Do not print [rank N] before lines.")
@click.pass_context
def run_command(ctx: click.Context, /, spec: Path | None, **flags: Any) -> None:
    """Run COMMAND in a lab, once per rank.

    headway lab run --hosts 2 --rate 400mbit -- python train.py

    SPEC is a lab file (YAML); options override it or replace it. The exit status is that of the first rank that
    fails, or 0.
    """
    command = trailing_command(ctx)
    wanted = _spec(load_spec(spec) if spec else None, flags)
    status = run(
        wanted,
        command,
        mode=cast(Mode, flags["mode"]),
        grace_s=parse_duration_s(flags["grace"], "grace", zero=True),
        timeout_s=parse_duration_s(flags["timeout"], "timeout") if flags["timeout"] else None,
        prefix=not flags["no_prefix"],
    )
    ctx.exit(status)


def _spec(base: LabSpec | None, flags: dict[str, Any]) -> LabSpec:
    if base is None and flags["hosts"] is None:
        raise LabError(
            "no lab is specified",
            expected="a lab file, or --hosts",
            fix="For example: --hosts 2 --rate 400mbit.",
        )
    plain = ("hosts", "workers_per_host", "rate", "up", "down", "slow_by")
    return override(
        base,
        **{name: flags[name] for name in plain},
        slow=parse_pairs(flags["slow"], "--slow"),
        pace=parse_pairs(flags["pace"], "--pace"),
        timeline=[parse_event(text) for text in flags["events"]],
    )


@lab.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_command(as_json: bool) -> None:
    """List running labs, and what killed labs left behind."""
    all_labs = state.labs()
    if as_json:
        rows = [_row(lab) for lab in all_labs]
        sys.stdout.write(files.dump_json(files.document("lab_list", labs=rows)))
        return
    if not all_labs:
        click.echo("no labs", err=True)
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("lab", "state", "mode", "hosts", "workers", "age"):
        table.add_column(heading, no_wrap=True)
    table.add_column("command", overflow="fold")
    for lab in all_labs:
        record = lab.record
        age_s = round((datetime.now(UTC) - record.started).total_seconds())
        cells = (record.id, lab.state, record.mode, record.hosts, record.workers, f"{age_s} s")
        table.add_row(*map(str, cells), Text(_printable(" ".join(record.command))))
    Console().print(table)


def _row(lab: state.Lab) -> dict[str, Any]:
    record = lab.record
    return {
        "id": record.id,
        "state": lab.state,
        "mode": record.mode,
        "hosts": record.hosts,
        "workers": record.workers,
        "launcher": record.launcher.pid,
        "started": record.started.isoformat(timespec="milliseconds"),
        "command": list(record.command),
        "pids": list(lab.pids),
    }


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


@lab.command("clean")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def clean_command(as_json: bool) -> None:
    """Remove processes and files left by labs whose launcher was killed. Running labs are not touched."""
    cleaned, stuck = state.clean()
    if as_json:
        rows = [_row(lab) for lab in cleaned]
        sys.stdout.write(files.dump_json(files.document("lab_clean", labs=rows)))
    else:
        for lab in cleaned:
            click.echo(f"cleaned {lab.record.id}: {len(lab.pids)} processes ended")
        if not cleaned and not stuck:
            click.echo("nothing to clean", err=True)
    if stuck:
        left = ", ".join(f"{lab.record.id}: {lab.pids or lab.record.group}" for lab in stuck)
        raise LabError("labs could not be removed", got=left)
