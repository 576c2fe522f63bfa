"""The timeline as values: a bounded choice of boxes from a trace, the steps, and the critical path."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.diagnosis import Diagnosis
from headway.diagnosis.communication import Communications, match
from headway.report import choice as choosing
from headway.report.boxes import (
    COMMUNICATION,
    Box,
    Window,
    communication_boxes,
    compute_boxes,
    laned,
    operator_boxes,
    other_boxes,
)
from headway.report.choice import DEFAULT_STEPS, MESSAGES, Choice
from headway.trace.events import Kind
from headway.trace.format import Trace
from headway.units import counted

MAX_BOXES = 20_000

_DETAIL_KINDS = (*MESSAGES, Kind.OPERATOR)


@dataclass(frozen=True, slots=True)
class Drawing:
    """The boxes of all drawn ranks over some steps, and where the steps and the critical path lie."""

    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]
    steps: tuple[tuple[int, float, float], ...]  # number, start, end
    view_ms: tuple[float, float]
    path: tuple[
        tuple[int, str, float, float], ...
    ]  # rank, kind, start, end: one for each of the diagnosis' pieces
    length_ms: float
    cut: str  # what is left out, or nothing

    @property
    def lanes(self) -> int:
        """The most lanes that any rank's communication needs."""
        return 1 + max((box.lane for box in self.boxes), default=0)


def draw(
    trace: Trace, diagnosis: Diagnosis, max_boxes: int = MAX_BOXES, rows: Communications | None = None
) -> Drawing:
    """Choose what to draw, and compute it. ``rows`` are the trace's matched communication, where that is known."""
    choice = choosing.choose(trace, diagnosis, max_boxes)
    bounds = _bounds(trace, choice)
    window = Window(min(start for start, _ in bounds.values()), max(end for _, end in bounds.values()))
    boxes = _boxes(trace, diagnosis, choice, window, match(trace, messages=True) if rows is None else rows)
    whole = len(boxes)
    cut = choosing.described(choice, trace, diagnosis)
    if whole > max_boxes:
        boxes = sorted(boxes, key=lambda box: (box.kind in _DETAIL_KINDS, -box.length_ms))[:max_boxes]
        boxes.sort(key=lambda box: (box.rank, box.row, box.start_ms, -box.end_ms))
        cut += f" Of {counted(whole, 'event')} in them, the {max_boxes} longest are drawn."
    at = choice.steps.index(diagnosis.typical_step)
    first = max(min(at - 1, len(choice.steps) - DEFAULT_STEPS), 0)
    shown = choice.steps[first : first + DEFAULT_STEPS]
    return Drawing(
        ranks=choice.ranks,
        boxes=tuple(boxes),
        steps=tuple((step, window.ms(start), window.ms(end)) for step, (start, end) in bounds.items()),
        view_ms=(window.ms(bounds[shown[0]][0]), window.ms(bounds[shown[-1]][1])),
        path=tuple(
            (piece.rank, piece.kind, window.ms(piece.start_ns), window.ms(piece.end_ns))
            for piece in diagnosis.critical_path
        ),
        length_ms=window.ms(window.end_ns),
        cut=cut.strip(),
    )


def _bounds(trace: Trace, choice: Choice) -> dict[int, tuple[int, int]]:
    """From the first rank's start to the last rank's end of each step."""
    found: dict[int, tuple[int, int]] = {}
    wanted = set(choice.steps)
    for rank in choice.ranks:
        for row in trace.events[rank].of_kind(Kind.STEP):
            if row.step in wanted:
                start, end = found.get(row.step, (row.start_ns, row.end_ns))
                found[row.step] = (min(start, row.start_ns), max(end, row.end_ns))
    return dict(sorted(found.items()))


def _boxes(
    trace: Trace, diagnosis: Diagnosis, choice: Choice, window: Window, rows: Communications
) -> list[Box]:
    matched = {Kind.COLLECTIVE, *MESSAGES, *rows.kind.tolist()}
    near = (rows.enqueue_ns < window.end_ns) & (rows.end_ns > window.start_ns)
    if not choice.messages:
        near &= (rows.kind != Kind.SEND) & (rows.kind != Kind.RECEIVE)
    rows = rows.where(near)
    rows = rows.where(np.argsort(rows.rank, kind="stable"))
    boxes: list[Box] = []
    for rank in choice.ranks:
        events = window.of(trace.events[rank])
        own = rows.where(np.arange(*np.searchsorted(rows.rank, [rank, rank + 1])))
        boxes += compute_boxes(rank, events, window, choice.coarse)
        if choice.operators or rank in choice.operator_ranks:
            boxes += operator_boxes(
                rank, events, window, None if choice.operators else diagnosis.typical_step
            )
        others = list(other_boxes(rank, events, window, matched))
        boxes += (box for box in others if box.row != COMMUNICATION)
        others_communicating = (box for box in others if box.row == COMMUNICATION)
        boxes += laned([*communication_boxes(rank, own, window), *others_communicating])
    return boxes
