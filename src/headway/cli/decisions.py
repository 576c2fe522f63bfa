"""``headway decisions``: the decisions made while a job trained, and why."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headway.cli.output import console, error_console, print_document

if TYPE_CHECKING:
    from headway.strategies.decisions import Entry

MAX_LISTED = 40


@click.command("decisions")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a page with charts of the decisions to this file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def decisions(file: Path, html: Path | None, as_json: bool) -> None:
    """Print the decisions made during a run, and why. FILE was written by headway run --decisions FILE.

    Consecutive decisions that differ only in numbers share one line.
    """
    from rich.table import Table

    from headway import files
    from headway.report import words
    from headway.report.decisions import decisions_page, start_numbers, summary
    from headway.strategies.decisions import read_journal

    entries = read_journal(file)
    if html is not None:
        files.write_text(html, decisions_page(entries, file.name))
    if as_json:
        print_document("decisions", {"decisions": [entry.model_dump(mode="json") for entry in entries]})
        return
    answers = console()
    answers.print(summary(entries))
    numbers = start_numbers(entries)
    rows = _alike_in_a_row(entries, numbers)
    table = Table("after step", "took", "decision", "because", box=None, pad_edge=False)
    for alike, start in rows[-MAX_LISTED:]:
        first, last = alike[0], alike[-1]
        steps = f"{first.step}" if first is last else f"{first.step} to {last.step}"
        decision = (
            f"now {last.order}, instead of {last.before}" if last.switches else f"goes on with {last.order}"
        )
        table.add_row(
            steps + (f" of start {start + 1}" if numbers[-1] else ""),
            words.duration(last.measured_ms),
            words.plain(decision),
            words.plain(last.reason) + (f" (decided {len(alike)} times)" if len(alike) > 1 else ""),
        )
    answers.print(table)
    if len(rows) > MAX_LISTED:
        answers.print(f"{len(rows) - MAX_LISTED} earlier lines are not shown; --json lists every decision.")
    if html is not None:
        error_console().print(f"Wrote {html}")


def _alike_in_a_row(entries: list[Entry], start_numbers: list[int]) -> list[tuple[list[Entry], int]]:
    """Groups consecutive decisions of one kind, each with the number of the job's (re)start that they belong to."""
    pairs = groupby(zip(entries, start_numbers, strict=True), key=lambda pair: (pair[0].kind, pair[1]))
    return [([entry for entry, _ in alike], start) for (_, start), alike in pairs]
