"""The diagnosis as a summary in GitHub's Markdown, for a job's page or a pull request's comment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from headway.diagnosis import Diagnosis
from headway.diagnosis.breakdown import PARTS
from headway.diagnosis.comparison import Comparison
from headway.errors import one_line
from headway.report.palette import PART_LABELS

MAX_MARKDOWN_RANKS = 16
MOST_CHARACTERS = 2000  # of a sentence or a note
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~<>&@$-]|(?<=\d)\.(?=\s))")
# GitHub looks for mentions, references, addresses and emoji in what is left when backslashes have been read.
_REFERRING = re.compile(r"([@#]|:(?=\S)|\bwww(?=\.)|\bGH(?=-))", re.IGNORECASE)
_GAP = "\u200b"  # no character of the text itself: it is not printable


def markdown(diagnosis: Diagnosis, comparison: Comparison | None = None) -> str:
    """The summary. What came from the trace is escaped: it cannot become a link, an image, a mention or a tag."""
    lines = []
    if comparison is not None:
        lines += [f"**{'❌' if comparison.regressed else '✅'} {_escaped(comparison.sentence)}**", ""]
    lines += [f"**{_escaped(diagnosis.verdict)}**", ""]
    standing = [one for one in diagnosis.findings if one.stands_out]
    if len(standing) > 1:
        rows = [(one.cause.replace("_", " "), _ms(one.cost_ms), _ranks(one.ranks)) for one in standing]
        lines += [*_markdown_table(("Finding", "Cost, ms a step", "Ranks"), rows), ""]
    lines += [*_markdown_breakdown(diagnosis, comparison), ""]
    if diagnosis.notes:
        lines += ["<details><summary>Before you trust the numbers</summary>", ""]
        lines += [f"- {_escaped(note)}" for note in diagnosis.notes]
        lines += ["", "</details>", ""]
    return "\n".join(lines)


def _markdown_breakdown(diagnosis: Diagnosis, comparison: Comparison | None) -> list[str]:
    """The slowest ranks' mean steps, in parts, and by how much the mean over all ranks changed."""
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
        whole = f"{comparison.step_ms - comparison.baseline_step_ms:+.2f}"
        rows.append(("change", *changes, whole))
    lines = [
        f"Headway diagnosis: mean step of {len(diagnosis.steps)} recorded, in ms",
        "",
        *_markdown_table(header, rows),
    ]
    if len(diagnosis.breakdown) > len(ranks):
        lines.append(
            f"\nThe {len(ranks)} of {len(diagnosis.breakdown)} ranks that compute longest are listed."
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
    """Plain text on one line: what Markdown, HTML or GitHub would read as its own is escaped or broken up."""
    broken = _REFERRING.sub(rf"\1{_GAP}", one_line(text, limit=MOST_CHARACTERS))
    return _SPECIAL.sub(r"\\\1", broken).replace(_GAP, "&#8203;")
