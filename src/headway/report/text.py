"""Prints a diagnosis as text for terminals, and as Markdown for pull requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.diagnosis import Diagnosis
from headway.diagnosis.averaging import Averaging
from headway.diagnosis.breakdown import PARTS
from headway.diagnosis.comparison import Comparison
from headway.diagnosis.stragglers import UNKNOWN
from headway.errors import one_line
from headway.report.words import PART_LABELS, plain, short_label
from headway.units import format_rate

MAX_RANKS = 32
MAX_NAME = 80  # characters
MAX_PATH = 24


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Prints the verdict, findings, notes and tables of ``diagnosis``.

    Text from the trace is printed as plain text, never as markup or control characters.
    """
    console.print(Text(plain(diagnosis.verdict), style="bold"), soft_wrap=True)
    for finding in diagnosis.findings:
        if finding.stands_out and finding.sentence.rstrip(".") not in diagnosis.verdict:
            console.print(Text(plain(f"Also: {finding.sentence}")), soft_wrap=True)
    busy = () if diagnosis.details is None else (diagnosis.details.job.contention,)
    for note in filter(None, (*busy, *diagnosis.notes)):
        console.print(Text(plain(f"Note: {note}"), style="yellow"), soft_wrap=True)
    console.print()
    _print(console, _breakdown(diagnosis))
    hidden = len(diagnosis.breakdown) - MAX_RANKS
    if hidden > 0:
        console.print(Text(f"and {hidden} more ranks (--json lists all)"))
    if diagnosis.overlap_percent or diagnosis.links:
        console.print(
            Text(f"{diagnosis.overlap_percent:.0f} % of communication is hidden under computation.")
        )
    console.print()
    if diagnosis.averaging is not None:
        _print_averaging(diagnosis.averaging, console)
    if diagnosis.stragglers:
        _print(console, _stragglers(diagnosis))
    if diagnosis.links:
        _print(console, _links(diagnosis))
    _print(console, _path(diagnosis))


def _print(console: Console, table: Table) -> None:
    """Prints the title above ``table`` itself, because a narrow table would wrap it."""
    title, table.title = table.title, None
    if title is not None:
        console.print(Text(str(title), style="bold"), soft_wrap=True)
    console.print(table)


def _table(title: str, *columns: tuple[str, bool]) -> Table:
    """A table with columns (header, is numeric)."""
    table = Table(title=title, box=None, pad_edge=False)
    for header, number in columns:
        table.add_column(header, justify="right" if number else "left", header_style="dim", overflow="fold")
    return table


def _breakdown(diagnosis: Diagnosis) -> Table:
    title = f"Mean step, ms ({len(diagnosis.steps)} recorded)"
    table = _table(title, ("rank", True), *((short_label(part), True) for part in PARTS), ("step", True))
    for rank, parts in list(diagnosis.breakdown.items())[:MAX_RANKS]:
        values = [f"{getattr(parts, part):.2f}" for part in PARTS]
        table.add_row(str(rank), *values, f"{parts.total_ms:.2f}")
    return table


def _stragglers(diagnosis: Diagnosis) -> Table:
    is_reported = any(finding.cause == "straggler" and finding.stands_out for finding in diagnosis.findings)
    table = _table(
        "Stragglers" if is_reported else "Ranks that other ranks wait for",
        ("rank", True),
        ("cost to others, ms per step", True),
        ("cause", False),
    )
    for straggler in diagnosis.stragglers:
        cause = "not seen in the trace" if straggler.cause == UNKNOWN else plain(straggler.cause)
        table.add_row(str(straggler.rank), f"{straggler.cost_ms:.2f}", Text(cause))
    return table


def _print_averaging(averaging: Averaging, console: Console) -> None:
    """Prints how training changes, a summary of the groups, and a table of ranks."""
    console.print(Text(plain(f"Change to the training: {averaging.changes_training}.")), soft_wrap=True)
    console.print(Text(plain(averaging.describe())), soft_wrap=True)
    table = _table(
        "Averaging groups, ms per step", ("rank", True), ("blocked", True), ("until the group begins", True),
        ("others wait for it", True),
    )  # fmt: skip
    for rank in list(averaging.standing_ms)[:MAX_RANKS]:
        values = (
            averaging.standing_ms[rank],
            averaging.forming_ms[rank],
            averaging.waited_for_ms.get(rank, 0.0),
        )
        table.add_row(str(rank), *(f"{value:.2f}" for value in values))
    _print(console, table)


def _links(diagnosis: Diagnosis) -> Table:
    table = _table("Links", ("from", False), ("to", False), ("goodput", True), ("utilisation", True))
    for link in diagnosis.links[:MAX_RANKS]:
        table.add_row(
            Text(plain(link.source)),
            Text(plain(link.target)),
            format_rate(link.gbps),
            f"{100 * link.utilisation:.0f} %",
        )
    return table


def _short(name: str) -> str:
    """Shortens a name to fit a line: kernel names may have hundreds of characters."""
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"


def _path(diagnosis: Diagnosis) -> Table:
    title = f"Critical path of step {diagnosis.typical_step}, in time order"
    table = _table(title, ("rank", True), ("what", False), ("name", False), ("ms", True))
    for piece in diagnosis.critical_path[:MAX_PATH]:
        table.add_row(str(piece.rank), Text(piece.kind), Text(_short(plain(piece.name))), f"{piece.ms:.2f}")
    left_out = diagnosis.critical_path[MAX_PATH:]
    if left_out:
        table.add_row("", "…", f"{len(left_out)} more pieces", f"{sum(piece.ms for piece in left_out):.2f}")
    return table


MAX_MARKDOWN_RANKS = 16
MOST_CHARACTERS = 2000  # per sentence or note
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~<>&@$-]|(?<=\d)\.(?=\s))")
# GitHub finds mentions, references, addresses and emoji after it has processed backslashes.
_REFERRING = re.compile(r"([@#]|:(?=\S)|\bwww(?=\.)|\bGH(?=-))", re.IGNORECASE)
_GAP = "\u200b"  # never part of the text itself, because it is not printable


def markdown(diagnosis: Diagnosis, comparison: Comparison | None = None) -> str:
    """Renders a Markdown summary. Text from the trace is escaped: it cannot become a link, image, mention or tag."""
    lines = []
    if comparison is not None:
        lines += [f"**{'❌' if comparison.regressed else '✅'} {_escaped(comparison.sentence)}**", ""]
    lines += [f"**{_escaped(diagnosis.verdict)}**", ""]
    standing = [finding for finding in diagnosis.findings if finding.stands_out]
    if len(standing) > 1:
        rows = [
            (finding.cause.replace("_", " "), _ms(finding.cost_ms), _ranks(finding.ranks))
            for finding in standing
        ]
        lines += [*_markdown_table(("Finding", "Cost, ms per step", "Ranks"), rows), ""]
    lines += [*_markdown_breakdown(diagnosis, comparison), ""]
    if diagnosis.notes:
        lines += ["<details><summary>Before you trust the numbers</summary>", ""]
        lines += [f"- {_escaped(note)}" for note in diagnosis.notes]
        lines += ["", "</details>", ""]
    return "\n".join(lines)


def _markdown_breakdown(diagnosis: Diagnosis, comparison: Comparison | None) -> list[str]:
    """The mean steps of the slowest ranks in parts, and the change of the mean over all ranks."""
    ranks = sorted(diagnosis.breakdown, key=lambda rank: -diagnosis.breakdown[rank].computation)[
        :MAX_MARKDOWN_RANKS
    ]
    header = ("Rank", *(PART_LABELS[part] for part in PARTS), "Step")
    rows = []
    for rank in sorted(ranks):
        parts = diagnosis.breakdown[rank]
        rows.append((str(rank), *(_ms(getattr(parts, part)) for part in PARTS), _ms(parts.total_ms)))
    if comparison is not None:
        changes = (f"{comparison.parts_ms[part]:+.2f}" for part in PARTS)
        total = f"{comparison.step_ms - comparison.baseline_step_ms:+.2f}"
        rows.append(("change", *changes, total))
    lines = [
        f"Headway diagnosis: mean of {len(diagnosis.steps)} recorded steps, in ms",
        "",
        *_markdown_table(header, rows),
    ]
    if len(diagnosis.breakdown) > len(ranks):
        lines.append(
            f"\nOnly the {len(ranks)} of {len(diagnosis.breakdown)} ranks that compute longest are listed."
        )
    return lines


def _markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    ruler = "|---|" + "---:|" * (len(header) - 1)
    return [_row(header), ruler, *(_row(row) for row in rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _ms(value: float) -> str:
    return f"{value:.2f}"


def _ranks(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:8]))


def _escaped(text: str) -> str:
    """Plain text on one line: Markdown, HTML and GitHub syntax is escaped or broken up."""
    broken = _REFERRING.sub(rf"\1{_GAP}", one_line(text, limit=MOST_CHARACTERS))
    return _SPECIAL.sub(r"\\\1", broken).replace(_GAP, "&#8203;")
