"""Lays out one step of a pipeline as a picture: which micro-batch each rank works on over time, and when it waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headway.report import words
from headway.trace.events import Event, Kind
from headway.trace.format import Trace
from headway.units import counted

MAX_RANKS, MAX_CELLS = 64, 4000
WIDTH, MARGIN, LANE, GAP, AXIS = 1000.0, 64.0, 26.0, 6.0, 22.0
TICKS = 6
_DIGIT = 7.5  # width of a digit
_PASSES = (Kind.FORWARD_PASS, Kind.BACKWARD_PASS)


class Cell(NamedTuple):
    """A stretch of one rank's work. ``number`` is the micro-batch, "" for an update."""

    rank: int
    what: str
    number: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Box:
    """A cell in the picture's units.

    ``text`` is shown inside with the CSS class ``ink`` if there is room; ``title`` is the tooltip.
    """

    x: float
    y: float
    width: float
    colour: str
    ink: str
    text: str
    title: str


@dataclass(frozen=True, slots=True)
class PipelinePicture:
    """A lane per rank (label, y), boxes, time marks (x, label) and the legend (label, colour)."""

    title: str
    height: float
    lanes: tuple[tuple[str, float], ...]
    boxes: tuple[Box, ...]
    marks: tuple[tuple[float, str], ...]
    legend: tuple[tuple[str, str], ...]
    left_out: str

    width: float = WIDTH
    margin: float = MARGIN
    lane: float = LANE
    lane_width: float = WIDTH - MARGIN


def pipeline_picture(trace: Trace, step: int) -> PipelinePicture | None:
    """The picture of ``step`` of a recorded pipeline; None if the job is no pipeline."""
    ranks = [rank for rank in sorted(trace.events) if trace.events[rank].stage.max(initial=-1) >= 0]
    cells = [cell for rank in ranks[:MAX_RANKS] for cell in cells_of(rank, _rows(trace, rank, step))]
    if not any(cell.number for cell in cells):
        return None
    shown = cells[:MAX_CELLS]
    drawn = sorted({cell.rank for cell in shown})
    return _layout(shown, drawn, step, ranks_left_out=len(ranks) - len(drawn))


def cells_of(rank: int, rows: Sequence[Event]) -> list[Cell]:
    """A rank's work in a step, from its ``rows`` in time order.

    If a micro-batch has two backwards, the first computes gradients of inputs, the second gradients of weights.
    """
    spans: list[tuple[tuple[str, int, int], int, int]] = []
    for row in rows:
        key = (row.kind, row.stage, row.micro_batch)
        if spans and spans[-1][0] == key:  # in pieces
            spans[-1] = (key, spans[-1][1], row.end_ns)
        else:
            spans.append((key, row.start_ns, row.end_ns))
    keys = [key for key, _, _ in spans]
    return [
        Cell(rank, _what(key, keys, place), f"{key[2]}" if key[2] >= 0 else "", start_ns, end_ns)
        for place, (key, start_ns, end_ns) in enumerate(spans)
    ]


def _rows(trace: Trace, rank: int, step: int) -> list[Event]:
    rows: Iterator[Event] = iter(trace.events[rank].of_step(step).of_kind(*_PASSES, Kind.OPTIMIZER))
    passes = (row for row in rows if row.micro_batch >= 0 or row.kind == Kind.OPTIMIZER)
    return sorted(passes, key=lambda row: row.start_ns)


def _what(key: tuple[str, int, int], keys: Sequence[tuple[str, int, int]], place: int) -> str:
    kind = key[0]
    if kind == Kind.OPTIMIZER:
        return words.UPDATE_PASS
    if kind == Kind.FORWARD_PASS:
        return words.FORWARD_PASS
    if keys.count(key) == 1:
        return words.WHOLE_BACKWARD
    return words.INPUT_GRADIENT if keys.index(key) == place else words.WEIGHT_GRADIENT


def _layout(
    cells: Sequence[Cell], ranks: Sequence[int], step: int, *, ranks_left_out: int
) -> PipelinePicture:
    begin_ns, end_ns = min(cell.start_ns for cell in cells), max(cell.end_ns for cell in cells)
    length_ns = max(1, end_ns - begin_ns)
    scale = (WIDTH - MARGIN) / length_ns
    tops = {rank: place * (LANE + GAP) for place, rank in enumerate(ranks)}
    used = {cell.what for cell in cells}
    numbers = {cell.number for cell in cells if cell.number}
    bottom = len(ranks) * (LANE + GAP)
    return PipelinePicture(
        title=f"Step {step} of the pipeline: {counted(len(numbers), 'micro-batch', 'micro-batches')} on "
        f"{counted(len(ranks), 'rank')} in {words.duration(length_ns / 1e6)}",
        height=bottom + AXIS,
        lanes=tuple((f"rank {rank}", tops[rank]) for rank in ranks),
        boxes=tuple(_box(cell, MARGIN + (cell.start_ns - begin_ns) * scale, tops[cell.rank], scale) for cell in cells),
        marks=tuple(
            (MARGIN + (WIDTH - MARGIN) * part / TICKS, words.duration(length_ns * part / TICKS / 1e6))
            for part in range(TICKS + 1)
        ),
        legend=tuple(entry for entry in words.PASS_COLOURS.items() if entry[0] in used | {words.WAITING}),
        left_out=f"{counted(ranks_left_out, 'more rank')} not drawn." if ranks_left_out > 0 else "",
    )  # fmt: skip


def _box(cell: Cell, x: float, y: float, scale: float) -> Box:
    width = (cell.end_ns - cell.start_ns) * scale
    of = f" of micro-batch {cell.number}" if cell.number else ""
    return Box(
        x=x,
        y=y,
        width=max(width, 0.5),
        colour=words.PASS_COLOURS[cell.what],
        ink="on-pale" if cell.what in words.PALE_PASSES else "on-dark",
        text=cell.number if width > _DIGIT * len(cell.number) + 2 else "",
        title=f"rank {cell.rank}: {cell.what}{of}, {words.duration((cell.end_ns - cell.start_ns) / 1e6)}",
    )
