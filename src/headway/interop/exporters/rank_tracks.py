"""Lays out one rank's events on tracks, and orders their beginnings and ends.

A lane is an array of moves ordered by time: ``2 * row`` where the span of that row begins, ``2 * row + 1`` where it
ends. At equal times a span ends before others begin, the inner before the outer, and an empty span begins and ends in
immediate succession.
"""

from __future__ import annotations

import heapq
from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.arrays import Ints
from headway.trace.events import Events, Kind, Stream

MAX_DEPTH = 256  # viewers refuse deeper nesting
MAX_NESTING_LANES = 8  # spans that fit into none of them are not nested, which bounds the cost of odd input


def nesting_lanes(starts: Ints, ends: Ints, inwards: Ints) -> list[Ints]:
    """Distribute spans over few lanes on which they nest properly.

    Of spans with equal start and end, the one with the lower ``inwards`` is the outer.
    """
    order = np.lexsort((inwards, ~ends, starts))
    lanes: list[tuple[list[tuple[int, int]], array[int]]] = []
    left: list[int] = []
    for row, start, end in zip(order.tolist(), starts[order].tolist(), ends[order].tolist(), strict=True):
        for open_spans, moves in lanes:
            while open_spans and open_spans[-1][0] <= start:
                moves.append(2 * open_spans.pop()[1] + 1)
            if not open_spans or (open_spans[-1][0] >= end and len(open_spans) < MAX_DEPTH):
                break
        else:
            if len(lanes) == MAX_NESTING_LANES:
                left.append(row)
                continue
            open_spans, moves = [], array("q")
            lanes.append((open_spans, moves))
        moves.append(2 * row)
        open_spans.append((end, row))
    for open_spans, moves in lanes:
        moves.extend(2 * row + 1 for _, row in reversed(open_spans))
    rest = np.array(left, dtype=np.int64)
    return [
        *(np.array(moves, dtype=np.int64) for _, moves in lanes),
        *(2 * rest[lane >> 1] + (lane & 1) for lane in disjoint_lanes(starts[rest], ends[rest])),
    ]


def disjoint_lanes(starts: Ints, ends: Ints) -> list[Ints]:
    """Distribute spans over the fewest lanes on which none overlap."""
    order = np.lexsort((ends, starts))
    lanes: list[array[int]] = []
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    for row, start, end in zip(order.tolist(), starts[order].tolist(), ends[order].tolist(), strict=True):
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane = len(lanes)
            lanes.append(array("q"))
        lanes[lane].extend((2 * row, 2 * row + 1))
        heapq.heappush(busy, (end, lane))
    return [np.array(moves, dtype=np.int64) for moves in lanes]


MATCHED = (Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE)  # kinds that can be matched across ranks
LONGEST_TEXT = 500
GRADIENTS, STEPS = "gradients ready", "steps"
# Viewers sort a rank's tracks by name, which puts the computation above the network.
_STREAM_NAMES: dict[object, str] = {Stream.COMPUTE: "computation", Stream.COMMUNICATION: "network"}
_BY_NAME_ALONE = (Kind.COLLECTIVE, Kind.OPERATOR, Kind.GRADIENT_READY)
_INWARDS = {
    kind: level
    for level, kind in enumerate(
        (
            Kind.STEP, Kind.FORWARD_PASS, Kind.BACKWARD_PASS, Kind.OPTIMIZER, Kind.INPUT,
            Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE, Kind.WAIT,
        )
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class RankTracks:
    """One rank's events on tracks.

    For each event, ``track`` is an index into ``names`` and ``label`` one into ``labels``, pairs of kind and title.
    ``moves`` are the beginnings (2 · row) and ends (2 · row + 1) in the order of ``times_ns``. Events on the track
    ``instants`` (-1 if there is none) have no end.
    """

    names: tuple[str, ...]
    labels: tuple[tuple[str, str], ...]
    track: Ints
    label: Ints
    instants: int
    moves: Ints
    times_ns: Ints


def rank_tracks(events: Events) -> RankTracks:
    """Lay out one rank's events.

    Computation is nested; if it cannot be, and if communication overlaps, their stream gets further tracks.
    """
    starts, ends = events.start_ns, ends_ns(events)
    pairs, label = _labels(events)
    inwards = np.array([_INWARDS.get(kind, len(_INWARDS)) << 32 | len(title) for kind, title in pairs])
    inwards = inwards.astype(np.int64)[label]
    instant = (events.kind == Kind.GRADIENT_READY) & (events.duration_ns == 0)
    names: list[str] = []
    track = np.zeros(len(events), dtype=np.int64)
    moves: list[Ints] = []
    for name, rows, nested in _groups(events, instant):
        if nested:
            lanes = nesting_lanes(starts[rows], ends[rows], inwards[rows])
        else:
            lanes = disjoint_lanes(starts[rows], ends[rows])
        digits = len(str(len(lanes)))
        for number, lane in enumerate(lanes, 1):
            lane_rows = rows[lane >> 1]
            track[lane_rows] = len(names)
            names.append(name if number == 1 else f"{name} {number:0{digits}}")
            moves.append(2 * lane_rows + (lane & 1))
    instants = -1
    if instant.any():
        instants = len(names)
        track[instant] = instants
        names.append(GRADIENTS)
        moves.append(2 * np.flatnonzero(instant))
    together = np.concatenate(moves) if moves else np.zeros(0, dtype=np.int64)
    times = np.where(together & 1, ends[together >> 1], starts[together >> 1])
    order = np.argsort(times, kind="stable")  # the order within a lane stays as it is
    return RankTracks(tuple(names), tuple(pairs), track, label, instants, together[order], times[order])


def ends_ns(events: Events) -> Ints:
    """When each event ended, limited to the largest 64-bit time."""
    ends = events.end_ns
    return np.where(ends < events.start_ns, np.iinfo(np.int64).max, ends)


def clean(text: object) -> str:
    """``text`` with unprintable characters escaped, cut to LONGEST_TEXT characters."""
    if not isinstance(text, str):
        return ""
    if not text.isprintable():
        text = "".join(
            c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: LONGEST_TEXT + 1]
        )
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"


def title(kind: str, name: str) -> str:
    """An event's title, such as "forward layer1", "optimizer SGD" or "all_reduce"; a step's ``name`` is its number."""
    words = kind.replace("_", " ")
    if name and (kind in _BY_NAME_ALONE or name.startswith(f"{words} ")):
        return name
    return f"{words} {name}".strip()


def _labels(events: Events) -> tuple[list[tuple[str, str]], Ints]:
    names = events.name
    steps = np.flatnonzero(events.kind == Kind.STEP)
    if len(steps):
        names = names.copy()
        names[steps] = [str(step) for step in events.step[steps].tolist()]
    seen: dict[tuple[object, object], int] = {}
    index = np.fromiter(
        (seen.setdefault(pair, len(seen)) for pair in zip(events.kind.tolist(), names.tolist(), strict=True)),
        dtype=np.int64,
        count=len(events),
    )
    return [(clean(kind), title(clean(kind), clean(name))) for kind, name in seen], index


def _groups(events: Events, instant: npt.NDArray[np.bool_]) -> list[tuple[str, Ints, bool]]:
    """The groups of events with separate tracks: name, rows, and whether they nest."""
    steps = events.kind == Kind.STEP
    network = events.stream == Stream.COMMUNICATION
    for kind in MATCHED:
        network |= events.kind == kind
    network &= ~(steps | instant)
    groups = [
        (STEPS, np.flatnonzero(steps), True),
        (_STREAM_NAMES[Stream.COMMUNICATION], np.flatnonzero(network), False),
    ]
    rest = np.flatnonzero(~(steps | network | instant))
    streams: dict[object, list[int]] = {}
    for row, stream in zip(rest.tolist(), events.stream[rest].tolist(), strict=True):
        streams.setdefault(stream, []).append(row)
    groups.extend(
        (_STREAM_NAMES.get(stream, clean(stream)) or "other", np.array(rows), True)
        for stream, rows in streams.items()
    )
    return [group for group in groups if len(group[1])]
