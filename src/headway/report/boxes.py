"""Rectangles of one rank: what it computed, its operators below that, and its communication."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np

from headway.diagnosis.communication import Communications
from headway.diagnosis.timeline import COMPUTE_KINDS, REST, Segment, segments
from headway.report import words
from headway.report.palette import KIND_LABELS
from headway.trace.events import Event, Events, Kind, Stream
from headway.units import format_bytes

COMPUTE, OPERATORS, COMMUNICATION = "compute", "operators", "communication"
LANES = 3  # what overlaps on one rank's communication is drawn below each other, up to this many

_NS_A_MS = 1e6
_WHOLE = {Kind.FORWARD_PASS: Kind.FORWARD, Kind.BACKWARD_PASS: Kind.BACKWARD}
_NOT_SPANS = (Kind.STEP, Kind.GRADIENT_READY, Kind.OPERATOR)


@dataclass(frozen=True, slots=True)
class Box:
    """One rectangle: times in milliseconds from the drawing's start; it lies on ``row`` of ``rank``, in ``lane``."""

    rank: int
    row: str
    lane: int
    start_ms: float
    end_ms: float
    kind: str
    name: str
    step: int
    detail: str = ""
    pending_ms: float = 0.0  # how long before its start it was asked for

    @property
    def length_ms(self) -> float:
        """How long it lasts."""
        return self.end_ms - self.start_ms


@dataclass(frozen=True, slots=True)
class Window:
    """The time that is drawn."""

    start_ns: int
    end_ns: int

    def ms(self, moment_ns: int) -> float:
        """Milliseconds from the drawing's start."""
        return (moment_ns - self.start_ns) / _NS_A_MS

    def of(self, events: Events) -> Events:
        """The events that some of it covers."""
        return events.where((events.start_ns < self.end_ns) & (events.end_ns > self.start_ns))


def compute_boxes(rank: int, events: Events, window: Window, coarse: bool) -> Iterator[Box]:
    """The compute stream, flattened: each moment shows its innermost event. ``coarse`` draws passes whole."""
    steps = events.of_kind(Kind.STEP)
    found = segments(events.where(events.kind != Kind.OPERATOR), window.start_ns, window.end_ns)
    for segment in _coarse(found) if coarse else found:
        if segment.kind == REST:
            continue
        place = max(int(np.searchsorted(steps.start_ns, segment.start_ns, side="right")) - 1, 0)
        yield Box(
            rank, COMPUTE, 0, window.ms(segment.start_ns), window.ms(segment.end_ns), segment.kind, segment.name,
            int(steps.step[place]) if len(steps) else -1,
            f"bucket {segment.bucket}" if segment.bucket >= 0 else "",
        )  # fmt: skip


def _coarse(found: list[Segment]) -> list[Segment]:
    """Neighbouring segments of the same pass as one."""
    merged: list[Segment] = []
    for segment in found:
        segment = segment._replace(kind=_WHOLE.get(segment.kind, segment.kind))
        if merged and segment.kind in _WHOLE.values() and merged[-1].kind == segment.kind:
            merged[-1] = merged[-1]._replace(end_ns=segment.end_ns, name="")
        else:
            merged.append(segment)
    return merged


def operator_boxes(rank: int, events: Events, window: Window, step: int | None = None) -> Iterator[Box]:
    """Operators on the compute stream, of one step or of all; those inside others come after them."""
    picked = (events.kind == Kind.OPERATOR) & (events.stream == Stream.COMPUTE) & (events.duration_ns > 0)
    if step is not None:
        picked &= events.step == step
    rows = window.of(events.where(picked))
    for event in sorted(rows, key=lambda event: (event.start_ns, -event.end_ns)):
        yield _plain(rank, OPERATORS, event, window)


def other_boxes(rank: int, events: Events, window: Window, matched: Collection[str]) -> Iterator[Box]:
    """What neither the flattened compute stream nor the kinds ``matched`` show, such as pushes and pulls."""
    shown = (events.stream == Stream.COMPUTE) & np.isin(events.kind.astype(str), COMPUTE_KINDS)
    wanted = ~shown & (events.duration_ns > 0)
    for kind in (*matched, *_NOT_SPANS):
        wanted &= events.kind != kind
    for event in window.of(events.where(wanted)):
        if event.kind in KIND_LABELS:
            row = COMMUNICATION if event.stream == Stream.COMMUNICATION else COMPUTE
            yield _plain(rank, row, event, window)


def _plain(rank: int, row: str, event: Event, window: Window) -> Box:
    details = [format_bytes(event.size_bytes)] if event.size_bytes >= 0 else []
    details += [f"rank {event.peer} at the other end"] if event.peer >= 0 else []
    pending_ns = event.start_ns - event.enqueue_ns if 0 <= event.enqueue_ns < event.start_ns else 0
    return Box(
        rank, row, 0, window.ms(event.start_ns), window.ms(event.end_ns), event.kind, event.name, event.step,
        ", ".join(details), pending_ns / _NS_A_MS,
    )  # fmt: skip


def communication_boxes(rank: int, own: Communications, window: Window) -> Iterator[Box]:
    """Collectives and messages, from when all members had arrived; ``own`` are this rank's rows in the window."""
    for row in range(len(own)):
        begin = max(int(own.start_ns[row]), int(own.arrival_ns[row]))
        enqueue, arrival = int(own.enqueue_ns[row]), int(own.arrival_ns[row])
        yield Box(
            rank, COMMUNICATION, 0, window.ms(begin), window.ms(int(own.end_ns[row])), own.kind[row], own.name[row],
            int(own.step[row]), ", ".join(_details(own, row)), (begin - enqueue) / _NS_A_MS,
        )  # fmt: skip
        assert begin >= arrival


def _details(own: Communications, row: int) -> Iterator[str]:
    yield format_bytes(int(own.size_bytes[row]))
    if own.bucket[row] >= 0:
        yield f"bucket {own.bucket[row]}"
    if own.peer[row] >= 0:
        yield f"{'from' if own.kind[row] == Kind.RECEIVE else 'to'} rank {own.peer[row]}"
    if own.group[row]:
        yield f"group {words.plain(own.group[row], 40)}"
    late_ns = int(own.arrival_ns[row]) - int(own.enqueue_ns[row])
    if late_ns > 0:
        yield f"rank {own.last_rank[row]} arrived last, {words.duration(late_ns / _NS_A_MS)} after this one"


def laned(boxes: list[Box]) -> list[Box]:
    """One rank's communication in lanes, so that what overlaps lies below each other."""
    free = [float("-inf")] * LANES
    found = []
    for box in sorted(boxes, key=lambda box: box.start_ms):
        lane = next((lane for lane in range(LANES) if free[lane] <= box.start_ms), LANES - 1)
        free[lane] = max(free[lane], box.end_ms)
        found.append(replace(box, lane=lane))
    return found
