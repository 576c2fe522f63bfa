"""``headway decisions``: what was decided while a job trained, and why."""

from __future__ import annotations

from pathlib import Path

import click

from headway.cli.output import console, error_console, print_document

MAX_LISTED = 40


@click.command("decisions")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw them: write an HTML page to this file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def decisions(file: Path, html: Path | None, as_json: bool) -> None:
    """Say what was decided in a run while it trained, and why; headway run --decisions FILE wrote it."""
    from rich.table import Table

    from headway import files
    from headway.report import words
    from headway.report.decisions import decisions_page, starts, summary
    from headway.strategies.decisions import read_journal

    entries = read_journal(file)
    if html is not None:
        files.write_text(html, decisions_page(entries, file.name))
    if as_json:
        print_document("decisions", {"decisions": [each.model_dump(mode="json") for each in entries]})
        return
    answers = console()
    answers.print(summary(entries))
    numbers = starts(entries)
    switches = [(each, start) for each, start in zip(entries, numbers, strict=True) if each.switches]
    if switches:
        table = Table("after step", "took", "from", "to", "because", box=None, pad_edge=False)
        for each, start in switches[-MAX_LISTED:]:
            before, order, reason = (words.plain(text) for text in (each.before, each.order, each.reason))
            step = f"{each.step}" + (f" of start {start + 1}" if numbers[-1] else "")
            table.add_row(step, words.duration(each.measured_ms), before, order, reason)
        answers.print(table)
    if len(switches) > MAX_LISTED:
        answers.print(f"{len(switches) - MAX_LISTED} earlier switches are not listed.")
    if html is not None:
        error_console().print(f"Wrote {html}")
