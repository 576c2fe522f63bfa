"""What ``headway optimize`` prints of a plan's explanation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from headway.optimization.explanation import Explanation


def explanation_sentences(explained: Explanation) -> list[str]:
    """The explanation in short: its largest saving, what is left, and what would go further, where that was asked."""
    said = []
    if explained.choices:
        best = max(explained.choices, key=lambda each: each.saved_ms)
        if best.saved_ms > 0:
            where = f" ({best.where})" if best.where else ""
            said.append(f"Most is saved by {best.name}: {best.saved_ms:.1f} ms{where}.")
    said.append(explained.next_bottleneck)
    if explained.further is not None:
        said.append(explained.further.sentence)
    return said


def waterfall_table(explained: Explanation) -> Table:
    """From the recorded step to the plan's, choice by choice, in replayed ms."""
    table = Table("choice", "saves ms", "step ms", "on the critical path")
    table.add_row("as recorded", "", f"{explained.from_ms:.1f}", "")
    for each in explained.choices:
        table.add_row(each.name, f"{each.saved_ms:+.1f}", f"{each.step_ms:.1f}", each.where)
    table.caption = "replayed; each choice upon those above it"
    return table


def explanation_parts(explained: Explanation | None, *, in_full: bool) -> list[str | Table]:
    """What is printed of an explanation; ``in_full`` with all choices, or why there is none."""
    if explained is None:
        return ["The plan cannot be explained by replays of the job as it was recorded."] if in_full else []
    said: list[str | Table] = [*explanation_sentences(explained)]
    return [*said, waterfall_table(explained)] if in_full and explained.choices else said
