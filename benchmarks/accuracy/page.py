"""The page and the picture of what was predicted and measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from accuracy.configurations import CROWDED

REPRODUCTION = "reproduction"
PICTURE = "replay_accuracy.png"
_MARKS = {"ddp": "o", "decoupled": "^", "servers": "s"}

Row = dict[str, Any]


def page(name: str, document: dict[str, Any], words: str) -> str:
    """Errors by class, by plan and by model, then every configuration."""
    rows = document["rows"]
    what_if = [row for row in rows if row["class"] != REPRODUCTION]
    lines = [f"# {name}", "", words, "", f"![predicted against measured]({PICTURE})", ""]
    roomy = [row for row in what_if if row["class"] != CROWDED]
    summary = [(REPRODUCTION, [row for row in rows if row["class"] == REPRODUCTION]), ("what-if", what_if)]
    lines += _table("", [*summary, (f"what-if, {CROWDED} left out", roomy)])
    lines += _table("what-if, by what differs from the base run", _grouped(what_if, lambda row: row["class"]))
    lines += _table("what-if, by workers", _grouped(what_if, lambda row: row["lab"].partition("-")[0]))
    lines += _table("what-if, by plan", _grouped(what_if, lambda row: row["method"]))
    lines += _table("what-if, by model", _grouped(what_if, lambda row: row["case"]))
    lines += choices(rows)
    lines += ["## Every configuration", ""]
    columns = (
        "case", "lab", "method", "class", "measured ms", "quartiles", "steps", "stolen", "predicted ms", "error",
        "commit",
    )  # fmt: skip
    lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        low, high = row["spread_ms"]
        cells = (
            row["case"], row["lab"], row["method"], row["class"], f"{row['time_ms']:.1f}", f"{low:.1f} to {high:.1f}",
            str(row["steps"]), "" if row.get("stolen") is None else f"{row['stolen']:.1%}",
            f"{row['predicted_ms']:.1f}", f"{row['error']:+.2%}", row.get("commit", ""),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", ", ".join(f"{key} {value}" for key, value in document["environment"].items()), ""]
    return "\n".join(lines)


def choices(rows: Sequence[Row]) -> list[str]:
    """Whether the plan that is predicted to be the best is the best measured, lab by lab; none where no ± is told."""
    labs = _grouped(
        [row for row in rows if "uncertainty_ms" in row], lambda row: f"{row['case']} {row['lab']}"
    )
    compared = [(name, own) for name, own in labs if len(own) > 1]
    if not compared:
        return []
    wrong, same = [], 0
    for name, own in compared:
        taken = min(own, key=lambda row: row["predicted_ms"])
        best = min(own, key=lambda row: row["time_ms"])
        same += taken is best
        if taken["time_ms"] - best["time_ms"] > taken["uncertainty_ms"]:
            lost = taken["time_ms"] / best["time_ms"] - 1
            wrong.append(f"{name}: {taken['method']}, {lost:.1%} slower than {best['method']}")
    right = len(compared) - len(wrong)
    return [
        "## The plan that is predicted to be the best", "",
        f"It is the best measured, or slower by no more than its ±, in {right} of {len(compared)} labs (the very best "
        f"in {same}; plans are often within a few milliseconds of each other).", *(f"- {each}" for each in wrong), "",
    ]  # fmt: skip


def _grouped(rows: Sequence[Row], key: Callable[[Row], str]) -> list[tuple[str, list[Row]]]:
    names = list(dict.fromkeys(key(row) for row in rows))
    return [(name, [row for row in rows if key(row) == name]) for name in names]


def _table(title: str, groups: Sequence[tuple[str, Sequence[Row]]]) -> list[str]:
    lines = [f"## {title}", ""] if title else []
    lines += [
        "| class | configurations | median error | p95 | max | signed median |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in groups:
        if rows:
            errors = np.array([row["error"] for row in rows])
            size = np.abs(errors)
            cells = (
                f"{np.median(size):.2%}", f"{np.quantile(size, 0.95):.2%}", f"{size.max():.2%}",
                f"{np.median(errors):+.2%}",
            )  # fmt: skip
            lines.append(f"| {name} | {len(rows)} | {' | '.join(cells)} |")
    return [*lines, ""]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Predicted against measured steps, one mark a configuration."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    most = max(max(row["time_ms"], row["predicted_ms"]) for row in rows) * 1.05
    least = min(min(row["time_ms"], row["predicted_ms"]) for row in rows) * 0.95
    line = np.array([least, most])
    axes.plot(line, line, color="#444444", linewidth=0.8)
    axes.fill_between(line, line * 0.95, line * 1.05, color="#dddddd", label="within 5 %")
    for name, own in _grouped(rows, lambda row: row["class"]):
        for plan, mark in _MARKS.items():
            chosen = [row for row in own if row["method"].startswith(plan)]
            first = plan == "ddp"
            colour = f"C{list(dict.fromkeys(row['class'] for row in rows)).index(name)}"
            axes.scatter(
                [row["time_ms"] for row in chosen], [row["predicted_ms"] for row in chosen],
                marker=mark, s=28, color=colour, alpha=0.8, label=name if first else None,
            )  # fmt: skip
    axes.set_xlabel("measured step (ms)")
    axes.set_ylabel("predicted step (ms)")
    axes.legend(frameon=False, fontsize=9, title="o ddp, ^ decoupled, square: servers")
    figure.savefig(path)
