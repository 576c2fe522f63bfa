"""Finds the critical path of one step across ranks: shortening the step requires shortening something on it.

The walk goes backward in time from the end of the step on the rank that ends last. It follows computation on the same
rank. Where the rank waited for a collective, it follows the collective, and those it queued behind, back to the
arrival of the last member, and continues on that rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headway.diagnosis.breakdown import NS_A_MS, RankTime, Segment, segments
from headway.diagnosis.communication import Communications
from headway.trace.events import Kind
from headway.trace.format import Trace

TOLERANCE_NS = (
    200_000  # a waiting rank may be recorded as awake slightly before the collective is recorded as done
)
SLIVER_SHARE = 0.001  # of the step: shorter pieces are merged into their neighbour on the same rank

_KINDS = {Kind.FORWARD_PASS: Kind.FORWARD, Kind.BACKWARD_PASS: Kind.BACKWARD}


@dataclass(frozen=True, slots=True)
class PathPiece:
    """A stretch of the critical path on ``rank``. ``kind`` is the kind of an event, or ``rest``."""

    rank: int
    kind: str
    name: str
    start_ns: int
    end_ns: int

    @property
    def ms(self) -> float:
        """Its length in milliseconds."""
        return (self.end_ns - self.start_ns) / NS_A_MS


class _Row(NamedTuple):
    """One rank's view of one collective."""

    kind: str
    name: str
    bucket: int
    enqueue_ns: int
    start_ns: int
    end_ns: int
    arrival_ns: int
    last_rank: int


class _Piece(NamedTuple):
    """A piece of the walk before compaction."""

    rank: int
    kind: str
    name: str
    bucket: int
    start_ns: int
    end_ns: int


def typical_step(times: dict[int, RankTime]) -> tuple[int, int]:
    """The index of the step of median length, and the rank that ends it."""
    ranks = sorted(times)
    ends = np.stack([times[rank].step_end_ns for rank in ranks])
    lengths = ends - np.stack([times[rank].step_start_ns for rank in ranks])
    last = np.argmax(ends, axis=0)
    length = lengths[last, np.arange(ends.shape[1])]
    index = int(np.argsort(length, kind="stable")[(len(length) - 1) // 2])
    return index, ranks[int(last[index])]


def critical_path(
    trace: Trace, times: dict[int, RankTime], communications: Communications
) -> tuple[PathPiece, ...]:
    """The critical path of the typical step, in time order. The pieces are adjacent and add up to the step."""
    index, rank = typical_step(times)
    start_ns, end_ns = int(times[rank].step_start_ns[index]), int(times[rank].step_end_ns[index])
    if end_ns <= start_ns:
        return ()
    walk = _Walk(trace, communications, start_ns, end_ns)
    return compact(walk.back_from(rank), (end_ns - start_ns) * SLIVER_SHARE)


class _Walk:
    """The walk backward through one step's window."""

    def __init__(self, trace: Trace, communications: Communications, start_ns: int, end_ns: int) -> None:
        self._trace = trace
        self._start_ns, self._end_ns = start_ns, end_ns
        near = (communications.end_ns > start_ns) & (communications.enqueue_ns < end_ns)
        rows = communications.where(near)
        self._rows: dict[int, list[_Row]] = {rank: [] for rank in trace.events}
        columns = (getattr(rows, field).tolist() for field in _Row._fields)
        for rank, *values in zip(rows.rank.tolist(), *columns, strict=True):
            self._rows[rank].append(_Row(*values))
        self._segments: dict[int, list[Segment]] = {}

    def back_from(self, rank: int) -> list[_Piece]:
        """Walks back from the end of the window on ``rank``; returns the pieces in time order."""
        pieces: list[_Piece] = []
        now = self._end_ns
        while now > self._start_ns:
            segment = self._segment(rank, now)
            awaited = self._awaited(rank, segment, now) if segment.kind == Kind.WAIT else None
            if awaited is None:
                pieces.append(_Piece(rank, segment.kind, segment.name, segment.bucket, segment.start_ns, now))
                now = segment.start_ns
            else:
                now, rank = self._follow(rank, awaited, segment, now, pieces)
        return pieces[::-1]

    def _follow(
        self, rank: int, row: _Row, segment: Segment, now: int, pieces: list[_Piece]
    ) -> tuple[int, int]:
        """Follows a collective, and those it queued behind, to its last arrival; returns its time and rank."""
        if row.end_ns < now:  # the waiting rank took this long to continue
            pieces.append(_Piece(rank, Kind.WAIT, segment.name, segment.bucket, row.end_ns, now))
            now = row.end_ns
        while True:
            before = self._queued_behind(rank, row, now)
            begin = before.end_ns if before else min(max(row.arrival_ns, self._start_ns), now)
            if begin < now:
                pieces.append(_Piece(rank, row.kind, row.name, row.bucket, max(begin, self._start_ns), now))
            now = max(begin, self._start_ns)
            if before is None or now == self._start_ns:
                return now, row.last_rank
            row = before

    def _segment(self, rank: int, now: int) -> Segment:
        if rank not in self._segments:
            self._segments[rank] = segments(self._trace.events[rank], self._start_ns, self._end_ns)
        in_order = self._segments[rank]
        low, high = 0, len(in_order) - 1
        while low < high:
            middle = (low + high) // 2
            if in_order[middle].end_ns >= now:
                high = middle
            else:
                low = middle + 1
        return in_order[low]

    def _awaited(self, rank: int, wait: Segment, now: int) -> _Row | None:
        """The collective whose end released the wait: of those in flight, the last to end by ``now``."""
        flying = [
            row
            for row in self._rows[rank]
            if row.enqueue_ns < now and row.end_ns > wait.start_ns and row.arrival_ns < now
        ]
        ended = [row for row in flying if row.end_ns <= now + TOLERANCE_NS]
        named = [row for row in flying if row.bucket >= 0 and row.bucket == wait.bucket]
        if ended:
            return max(ended, key=lambda row: (min(row.end_ns, now), row in named))
        return min(named or flying, key=lambda row: row.end_ns, default=None)

    def _queued_behind(self, rank: int, row: _Row, now: int) -> _Row | None:
        """The collective that delayed ``row`` although all members had arrived, or None."""
        earlier = [
            candidate
            for candidate in self._rows[rank]
            if row.arrival_ns < candidate.end_ns < now
            and candidate.end_ns <= row.start_ns + TOLERANCE_NS
            and candidate.enqueue_ns <= row.enqueue_ns
            and candidate != row
        ]
        return max(earlier, key=lambda candidate: candidate.end_ns, default=None)


def compact(pieces: list[_Piece], sliver_ns: float) -> tuple[PathPiece, ...]:
    """Merges adjacent pieces of one rank and kind, then merges remaining slivers into the piece before them."""
    merged: list[list[_Piece]] = []
    for piece in pieces:
        piece = piece._replace(kind=_KINDS.get(piece.kind, piece.kind))
        if merged and _mergeable(merged[-1][0], piece):
            merged[-1].append(piece)
        else:
            merged.append([piece])
    runs: list[list[_Piece]] = []
    for run in merged:
        if runs and _mergeable(runs[-1][0], run[0]):
            runs[-1].extend(run)
        elif runs and runs[-1][0].rank == run[0].rank and run[-1].end_ns - run[0].start_ns < sliver_ns:
            runs[-1].extend(piece._replace(name="") for piece in run)
        else:
            runs.append(run)
    return tuple(
        PathPiece(run[0].rank, run[0].kind, _name(run), run[0].start_ns, run[-1].end_ns) for run in runs
    )


def _mergeable(a: _Piece, b: _Piece) -> bool:
    if (a.rank, a.kind) != (b.rank, b.kind):
        return False
    return a.kind not in (Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE) or a.name == b.name


def _name(run: list[_Piece]) -> str:
    """The name of a run: its only name, or the name that takes longest and the number of others.

    A run that lies mostly outside named events, such as forward time between modules, has no name.
    """
    lengths: dict[str, int] = {}
    for piece in run:
        label = f"{piece.name} (bucket {piece.bucket})" if piece.bucket >= 0 and piece.name else piece.name
        lengths[label] = lengths.get(label, 0) + piece.end_ns - piece.start_ns
    unnamed = lengths.pop("", 0)
    if not lengths or unnamed > sum(lengths.values()):
        return ""
    longest = max(lengths, key=lambda label: lengths[label])
    if len(lengths) == 1:
        return longest
    if run[0].kind == Kind.COLLECTIVE:
        return f"{run[0].name} ({len(lengths)} buckets)"
    # Modules of a Sequential are named by numbers, which would read as counts.
    shown = f"'{longest}'" if longest.replace(".", "").isdecimal() else longest
    return f"{shown} and {len(lengths) - 1} more"
