"""Draw what ``data_parallel.py`` has kept: its page, and the picture in the documentation.

python benchmarks/draw_data_parallel.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS
from data_parallel import WORDS
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from paced_training.methods import OURS, PUBLISHED, TUNED
from paced_training.page import page

from headway import files

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "when-decoupling-helps.svg"
FORWARD_SHARE = 1 / 3  # of computation, as in the models measured


def main() -> None:
    document = json.loads((RESULTS / "data_parallel.json").read_text())
    files.write_text(RESULTS / "data_parallel.md", page("data_parallel", document, WORDS))
    PICTURE.parent.mkdir(exist_ok=True)
    picture(document["rows"]).savefig(PICTURE, metadata={"Date": None})
    print(f"drawn: {len(document['rows'])} rows; {PICTURE.name}")


def most_speedup(ratio: np.ndarray) -> np.ndarray:
    """What decoupling gains at most over an ideal all-reduce, where one way takes ``ratio`` of computation."""
    f, b = FORWARD_SHARE, 1 - FORWARD_SHARE
    speedup: np.ndarray = (f + np.maximum(b, 2 * ratio)) / (np.maximum(f, ratio) + np.maximum(b, ratio))
    return speedup


def picture(rows: list[dict[str, Any]]) -> Figure:
    """Speedups over tuned DDP against c over computation, and the curve that bounds whole volumes."""
    figure = Figure(figsize=(8.4, 4.6), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    ratio = np.geomspace(0.02, 4, 400)
    axes.plot(
        ratio,
        most_speedup(ratio),
        color="#444444",
        label="at most, over an ideal all-reduce (backward = 2 forward)",
    )
    axes.axhline(1, color="#bbbbbb", linewidth=0.8)
    _points(axes, rows, PUBLISHED, "#d08770", "DeAR as published, tuned by Bayesian search")
    _points(axes, rows, OURS, "#2e6fb7", "Headway")
    axes.set_xscale("log")
    axes.set_xticks(
        [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 4], labels=["0.02", "0.05", "0.1", "0.2", "0.5", "1", "2", "4"]
    )
    axes.set_xlabel("one way of communication over computation, c / (t_f + t_b)")
    axes.set_ylabel("speedup over tuned DDP (measured)")
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    return figure


def _points(axes: Axes, rows: list[dict[str, Any]], method: str, colour: str, label: str) -> None:
    """One mark a case: round for 4 workers, square for 8, a triangle for 2 that really compute."""
    tuned_ms = {row["case"]: row["time_ms"] for row in rows if row["method"] == TUNED and "time_ms" in row}
    own = [row for row in rows if row["method"] == method and "time_ms" in row and row["case"] in tuned_ms]
    for mark, ending, words in (
        ("o", "-p4", "4 workers"),
        ("s", "-p8", "8 workers"),
        ("^", "mbit", "2, real"),
    ):
        chosen = [row for row in own if row["case"].endswith(ending)]
        if chosen:
            axes.scatter(
                [row["ratio_measured"] for row in chosen],
                [tuned_ms[row["case"]] / row["time_ms"] for row in chosen],
                marker=mark, color=colour, s=34, label=f"{label}, {words}",
            )  # fmt: skip


if __name__ == "__main__":
    main()
