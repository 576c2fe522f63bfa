"""Renders values for notebooks: a sentence and a small table, with all text escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from headway.errors import one_line

MOST_ROWS = 24
MOST_CHARACTERS = 400


def table_html(sentence: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """HTML of ``sentence`` above a table, limited to the first MOST_ROWS rows."""
    all_rows = list(rows)
    lines = [f"<p>{_text(sentence)}</p>", "<table>", _row(head, "th")]
    lines += [_row(row, "td") for row in all_rows[:MOST_ROWS]]
    lines.append("</table>")
    if len(all_rows) > MOST_ROWS:
        lines.append(f"<p>and {len(all_rows) - MOST_ROWS} more</p>")
    return "\n".join(lines)


def _row(cells: Sequence[object], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in cells) + "</tr>"


def _text(value: object) -> str:
    return html.escape(one_line(str(value), MOST_CHARACTERS))
