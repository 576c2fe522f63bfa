"""``headway export``: write a trace in formats of other tools."""

from __future__ import annotations

from pathlib import Path

import click

from headway import files
from headway.cli import output as output_of
from headway.errors import UserError
from headway.units import format_bytes

PERFETTO, CHAKRA, GOAL = "perfetto", "chakra", "goal"


@click.command("export")
@click.argument("folder", metavar="TRACE", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "format_name",
    type=click.Choice([PERFETTO, CHAKRA, GOAL]),
    required=True,
    help="perfetto: one file to open in ui.perfetto.dev. chakra: a folder with one execution trace per rank. "
    "goal: the operations that a replay of the trace simulates, for LogGOPSim and ATLAHS.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="The file or folder to write; a Perfetto file is compressed if its name ends in .gz.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def export(folder: Path, format_name: str, output: Path, as_json: bool) -> None:
    """Write TRACE in a format of another tool."""
    from headway.trace.folder import load_trace

    files.check_absent(output)
    notes: list[str] = []
    operations: int | None = None
    if format_name == PERFETTO:
        from headway.interop.exporters.perfetto import require_perfetto, write_perfetto

        if output.is_dir():
            raise UserError("the output is a folder", got=output, expected="the name of a new file")
        require_perfetto()  # fail before the work
        trace = load_trace(folder)
        with output_of.progress("Exporting") as show:
            write_perfetto(trace, output, show)
        written = [output]
        following = "open it in https://ui.perfetto.dev"
    elif format_name == GOAL:
        from headway.graph.goal import GoalWriter
        from headway.replayer.replayer import Replayer

        trace = load_trace(folder)
        with output_of.progress("Exporting"):
            replayer = Replayer(trace)
            operations = GoalWriter(*replayer.lay_out()).write(output)
        notes = list(replayer.lacks)
        written = [output]
        following = "convert it with txt2bin and simulate it with LogGOPSim"
    else:
        from headway.interop.exporters.chakra import write_chakra

        trace = load_trace(folder)
        with output_of.progress("Exporting"):
            written = write_chakra(trace, output)
        following = "one execution trace per rank"
    events = sum(len(event) for event in (*trace.events.values(), *trace.servers.values()))
    size_bytes = sum(path.stat().st_size for path in written)
    if as_json:
        output_of.print_document(
            "export",
            {
                "path": str(output),
                "format": format_name,
                "events": events,
                "bytes": size_bytes,
                "notes": notes,
            },
        )
        return
    wrote = f"{events} events" if operations is None else f"{operations} operations"
    output_of.console().print(
        f"Wrote {wrote} of {len(trace.events)} ranks ({format_bytes(size_bytes)}) to {output}: {following}."
    )
    for note in notes:
        output_of.console().print(f"Note: {note}")
