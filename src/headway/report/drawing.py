"""What the timeline draws: a bounded choice of boxes from a trace, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headway.diagnose import Diagnosis
from headway.diagnose.communication import match
from headway.diagnose.timeline import REST, Segment, segments
from headway.trace.events import Kind
from headway.trace.format import Trace
from headway.units import format_bytes

MAX_BOXES = 20_000
DEFAULT_STEPS = 3
LANES = 3  # collectives that overlap on one rank are drawn below each other, up to this many

_NS_A_MS = 1e6
_MODULE_KINDS = (Kind.FORWARD, Kind.BACKWARD)
_WHOLE = {Kind.FORWARD_PASS: Kind.FORWARD, Kind.BACKWARD_PASS: Kind.BACKWARD}


@dataclass(frozen=True, slots=True)
class Box:
    """One rectangle: times in milliseconds from the drawing's start; ``row`` is (rank, on communication, lane)."""

    rank: int
    communication: bool
    lane: int
    start_ms: float
    end_ms: float
    kind: str
    name: str
    step: int
    detail: str = ""
    pending_ms: float = 0.0  # how long before its start it was asked for


@dataclass(frozen=True, slots=True)
class Drawing:
    """The boxes of all ranks over some steps, and where the steps and the critical path lie."""

    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]
    steps: tuple[tuple[int, float, float], ...]  # number, start, end
    view_ms: tuple[float, float]
    path: tuple[tuple[int, str, float, float], ...]  # rank, kind, start, end
    length_ms: float
    cut: str  # what is left out, or nothing

    @property
    def lanes(self) -> int:
        """The most lanes that any rank's communication needs."""
        return 1 + max((box.lane for box in self.boxes), default=0)


def draw(trace: Trace, diagnosis: Diagnosis, max_boxes: int = MAX_BOXES) -> Drawing:
    """Choose what to draw: whole steps around the typical one, as many as ``max_boxes`` allows.

    Where not even a few steps would fit module by module, each pass is drawn as a whole.
    """
    steps = _chosen_steps(trace, diagnosis, max_boxes, ())
    coarse = len(steps) < min(DEFAULT_STEPS, len(diagnosis.steps)) or _sizes(trace, steps, ())[1] > max_boxes
    if coarse:
        steps = _chosen_steps(trace, diagnosis, max_boxes, _MODULE_KINDS)
    bounds = _bounds(trace, steps)
    start_ns, end_ns = min(start for start, _ in bounds.values()), max(end for _, end in bounds.values())
    boxes = [*_compute_boxes(trace, start_ns, end_ns, coarse), *_communication_boxes(trace, start_ns, end_ns)]
    whole = len(boxes)
    if whole > max_boxes:
        boxes = sorted(boxes, key=lambda box: box.start_ms - box.end_ms)[:max_boxes]
        boxes.sort(key=lambda box: (box.rank, box.communication, box.start_ms))
    at = steps.index(diagnosis.typical_step)
    first = max(min(at - 1, len(steps) - DEFAULT_STEPS), 0)
    shown = steps[first : first + DEFAULT_STEPS]
    view = (bounds[shown[0]][0], bounds[shown[-1]][1])
    return Drawing(
        ranks=tuple(sorted(trace.events)),
        boxes=tuple(boxes),
        steps=tuple(
            (step, _ms(start, start_ns), _ms(end, start_ns)) for step, (start, end) in bounds.items()
        ),
        view_ms=(_ms(view[0], start_ns), _ms(view[1], start_ns)),
        path=tuple(
            (piece.rank, piece.kind, _ms(piece.start_ns, start_ns), _ms(piece.end_ns, start_ns))
            for piece in diagnosis.critical_path
        ),
        length_ms=_ms(end_ns, start_ns),
        cut=_what_is_cut(steps, diagnosis, whole, len(boxes), coarse),
    )


def _ms(moment_ns: int, origin_ns: int) -> float:
    return (moment_ns - origin_ns) / _NS_A_MS


def _sizes(trace: Trace, steps: Sequence[int], without: tuple[str, ...]) -> tuple[dict[int, int], int]:
    """How many events each step holds over all ranks, some kinds left out; and their sum."""
    sizes = dict.fromkeys(steps, 0)
    for events in trace.events.values():
        counted = ~np.isin(events.kind.astype(str), (Kind.GRADIENT_READY, *without))
        numbers, counts = np.unique(events.step[counted], return_counts=True)
        for step, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if step in sizes:
                sizes[step] += count
    return sizes, sum(sizes.values())


def _chosen_steps(trace: Trace, diagnosis: Diagnosis, max_boxes: int, without: tuple[str, ...]) -> list[int]:
    """The typical step and its neighbours, grown on both sides while all their events fit."""
    sizes, _ = _sizes(trace, diagnosis.steps, without)
    steps = list(diagnosis.steps)
    low = high = steps.index(diagnosis.typical_step)
    total = sizes[steps[low]]
    while low > 0 or high < len(steps) - 1:
        go_low = low > 0 and (high == len(steps) - 1 or high - (low - 1) <= (high + 1) - low)
        step = steps[low - 1] if go_low else steps[high + 1]
        if total + sizes[step] > max_boxes:
            break
        total += sizes[step]
        low, high = (low - 1, high) if go_low else (low, high + 1)
    return steps[low : high + 1]


def _bounds(trace: Trace, steps: list[int]) -> dict[int, tuple[int, int]]:
    """From the first rank's start to the last rank's end of each step."""
    found: dict[int, tuple[int, int]] = {}
    wanted = set(steps)
    for events in trace.events.values():
        for row in events.of_kind(Kind.STEP):
            if row.step in wanted:
                start, end = found.get(row.step, (row.start_ns, row.end_ns))
                found[row.step] = (min(start, row.start_ns), max(end, row.end_ns))
    return dict(sorted(found.items()))


def _compute_boxes(trace: Trace, start_ns: int, end_ns: int, coarse: bool) -> list[Box]:
    boxes = []
    for rank, events in sorted(trace.events.items()):
        step_rows = [(row.start_ns, row.step) for row in events.of_kind(Kind.STEP)]
        index = 0
        found = segments(events, start_ns, end_ns)
        for segment in _coarse(found) if coarse else found:
            while index + 1 < len(step_rows) and step_rows[index + 1][0] <= segment.start_ns:
                index += 1
            if segment.kind != REST:
                detail = f"bucket {segment.bucket}" if segment.bucket >= 0 else ""
                step = step_rows[index][1] if step_rows else -1
                times = (_ms(segment.start_ns, start_ns), _ms(segment.end_ns, start_ns))
                boxes.append(Box(rank, False, 0, *times, segment.kind, segment.name, step, detail))
    return boxes


def _coarse(found: list[Segment]) -> list[Segment]:
    """Neighbouring segments of the same pass as one."""
    merged: list[Segment] = []
    for segment in found:
        segment = segment._replace(kind=_WHOLE.get(segment.kind, segment.kind))
        if merged and segment.kind in _MODULE_KINDS and merged[-1].kind == segment.kind:
            merged[-1] = merged[-1]._replace(end_ns=segment.end_ns, name="")
        else:
            merged.append(segment)
    return merged


def _communication_boxes(trace: Trace, start_ns: int, end_ns: int) -> list[Box]:
    near = {
        rank: events.where((events.start_ns < end_ns) & (events.end_ns > start_ns))
        for rank, events in trace.events.items()
    }
    rows = match(replace(trace, events=near))
    boxes = []
    for rank in sorted(trace.events):
        own = rows.of_rank(rank)
        begins = [max(pair) for pair in zip(own.start_ns.tolist(), own.arrival_ns.tolist(), strict=True)]
        free = [0] * LANES
        for row in sorted(range(len(own)), key=begins.__getitem__):
            begin, end = begins[row], int(own.end_ns[row])
            lane = next((lane for lane in range(LANES) if free[lane] <= begin), LANES - 1)
            free[lane] = max(free[lane], end)
            enqueue, arrival = int(own.enqueue_ns[row]), int(own.arrival_ns[row])
            details = [format_bytes(int(own.size_bytes[row]))]
            if own.bucket[row] >= 0:
                details.append(f"bucket {own.bucket[row]}")
            if arrival > enqueue:
                details.append(
                    f"rank {own.last_rank[row]} came last, {_ms(arrival, enqueue):.3f} ms after this one"
                )
            boxes.append(
                Box(
                    rank, True, lane, _ms(begin, start_ns), _ms(end, start_ns), own.kind[row], own.name[row],
                    int(own.step[row]), ", ".join(details), _ms(begin, enqueue),
                )
            )  # fmt: skip
    return boxes


def _what_is_cut(steps: list[int], diagnosis: Diagnosis, whole: int, drawn: int, coarse: bool) -> str:
    parts = []
    if len(steps) < len(diagnosis.steps):
        parts.append(
            f"Steps {steps[0]} to {steps[-1]} of {diagnosis.steps[0]} to {diagnosis.steps[-1]} are drawn, around the "
            "typical one, to keep this page small."
        )
    if coarse:
        parts.append("Passes are drawn whole, not module by module.")
    if drawn < whole:
        parts.append(f"Of {whole} events in them, the {drawn} longest are drawn.")
    return " ".join(parts)
