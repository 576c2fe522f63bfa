"""What the page's own scripts need to know, as values that JSON can hold. Foreign text is made showable here."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any

import numpy as np

from headway.report import words
from headway.report.boxes import OPERATORS
from headway.report.drawing import Drawing
from headway.report.history import Bar, History
from headway.report.layout import PITCH, Layout
from headway.report.palette import kind_label
from headway.report.ranks import RankView


class Table:
    """Texts that columns refer to by number, each held once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str, limit: int = words.MAX_NAME) -> int:
        """The number of ``text``, cut to ``limit`` characters."""
        return self._numbers.setdefault(words.plain(text, limit), len(self._numbers))

    @property
    def texts(self) -> list[str]:
        """The texts by number."""
        return list(self._numbers)


def columns(drawing: Drawing, layout: Layout) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The boxes as columns of numbers, and the tables of texts that ``kind``, ``name``, ``detail`` and ``step`` number.

    ``bottom`` and ``top`` are where a box lies while all ranks are shown.
    """
    tables = {name: Table() for name in ("kind", "name", "detail", "step")}
    boxes, places = drawing.boxes, layout.places()
    shared = {(box.rank, box.step) for box in boxes if box.row == OPERATORS}
    spans = [layout.span(box, (box.rank, box.step) in shared) for box in boxes]
    found: dict[str, Any] = {
        "left": np.array([box.start_ms for box in boxes], dtype=np.float64),
        "right": np.array([box.end_ms for box in boxes], dtype=np.float64),
        "bottom": np.array(
            [places[box.rank] + low for box, (low, _) in zip(boxes, spans, strict=True)], np.float32
        ),
        "top": np.array(
            [places[box.rank] + high for box, (_, high) in zip(boxes, spans, strict=True)], np.float32
        ),
        "rank": np.array([box.rank for box in boxes], dtype=np.int32),
        "kind": np.array([tables["kind"].number(box.kind) for box in boxes], dtype=np.int32),
        "name": np.array([tables["name"].number(box.name) for box in boxes], dtype=np.int32),
        "detail": np.array([tables["detail"].number(box.detail) for box in boxes], dtype=np.int32),
        "step": np.array([tables["step"].number(str(box.step)) for box in boxes], dtype=np.int32),
    }
    return found, {name: table.texts for name, table in tables.items()}


def page_data(
    drawing: Drawing, tables: dict[str, list[str]], past: History, views: tuple[RankView, ...], layout: Layout
) -> dict[str, Any]:
    """What the scripts start from: names, steps, bars of the history, and the selections of ranks."""
    numbers = [step for step, _, _ in drawing.steps]
    at = {step: index for index, step in enumerate(numbers)}
    return {
        "tables": tables | {"kind": [kind_label(kind) for kind in tables["kind"]]},
        "steps": [[str(step), start, end] for step, start, end in drawing.steps],
        "bars": [[str(bar.step), at.get(bar.step, -1), *_drawn(bar, numbers)] for bar in past.bars],
        "path": [list(piece) for piece in drawing.path],
        "view": list(opening_view(drawing)),
        "bounds": list(time_bounds(drawing)),
        "pitch": PITCH,
        "views": [_view(view, layout) for view in views],
    }


def opening_view(drawing: Drawing) -> tuple[float, float]:
    """The stretch of time that the timeline shows at first, in milliseconds."""
    start, end = drawing.view_ms
    low, high = time_bounds(drawing)
    margin = 0.01 * (end - start)
    if margin <= 0:
        return low, high
    return max(start - margin, low), min(end + margin, high)


def time_bounds(drawing: Drawing) -> tuple[float, float]:
    """How far the timeline's view may be moved."""
    margin = 0.02 * max(drawing.length_ms, 1e-3)
    return -margin, drawing.length_ms + margin


def _drawn(bar: Bar, numbers: list[int]) -> tuple[int, int]:
    """Which of the drawn steps a bar stands for, by their places; the end is exclusive."""
    first, last = bar.of_steps
    return bisect_left(numbers, first), bisect_right(numbers, last)


def _view(view: RankView, whole: Layout) -> dict[str, Any]:
    layout = Layout(view.ranks, whole.lanes, whole.blamed)
    return {
        "ranks": list(view.ranks),
        "height": layout.height_px,
        "range": list(layout.y_range),
        "labels": [list(label) for label in layout.labels()],
        "dense": layout.dense,
    }
