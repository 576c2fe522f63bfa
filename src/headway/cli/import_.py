"""``headway import``: convert other tools' recordings to a trace."""

from __future__ import annotations

import os
from pathlib import Path

import click

from headway.cli import output as output_of
from headway.errors import UserError, how_to_install, one_line
from headway.interop.readers.formats import SHIPPED

MAX_SHOWN = 20


@click.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="The folder to write the trace to."
)
@click.option(
    "--format",
    "format_name",
    metavar="FORMAT",
    default="auto",
    show_default=True,
    help=f"The format of all files in SOURCE: {', '.join(reader.name for reader in SHIPPED)}, or that of an installed "
    "reader.",
)
@click.option("--lenient", is_flag=True, help="Skip damaged parts of the input, and list what was dropped.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def import_(source: Path, output: Path, format_name: str, lenient: bool, as_json: bool) -> None:
    """Convert another tool's recording to a trace. SOURCE is a file, a folder or an archive."""
    _require_readers()
    from headway.interop.readers.importing import import_trace

    workers = os.cpu_count() or 1
    with output_of.progress("Importing") as show:
        done = import_trace(
            source, output, format_name=format_name, lenient=lenient, workers=workers, progress=show
        )
    manifest = done.manifest
    if as_json:
        output_of.print_document(
            "import",
            {
                "path": str(output),
                "framework": manifest.framework,
                "world_size": manifest.world_size,
                "ranks": [info.rank for info in manifest.ranks],
                "servers": [info.rank for info in manifest.servers],
                "steps": list(manifest.steps),
                "formats": done.formats,
                "left_out": list(done.left_out),
                "dropped_events": sum(info.dropped_events for info in manifest.ranks),
                "notes": list(manifest.notes),
            },
        )
        return
    console = output_of.console()
    steps = f"{len(manifest.steps)} step{'s' if len(manifest.steps) > 1 else ''}"
    ranks = f"{len(manifest.ranks)} of {manifest.world_size} ranks ({manifest.framework})"
    console.print(f"Imported {steps} of {ranks} into {output}; next: headway diagnose {output}")
    for note in manifest.notes[:MAX_SHOWN]:
        console.print(f"Note: {note}", style="yellow")
    if len(manifest.notes) > MAX_SHOWN:
        console.print(f"and {len(manifest.notes) - MAX_SHOWN} more notes (--json lists all)")
    if done.left_out:
        shown = ", ".join(done.left_out[:3])
        files = f"{len(done.left_out)} file{'s' if len(done.left_out) > 1 else ''}"
        console.print(f"Left out, of unknown format: {files} ({one_line(shown)})")


def _require_readers() -> None:
    """Raise UserError if the library that decodes the files is not installed."""
    try:
        import msgspec  # noqa: F401
    except ImportError:
        raise UserError(
            "importing traces needs msgspec, which is not installed",
            fix=f"Run: {how_to_install('traces')}.",
        ) from None
