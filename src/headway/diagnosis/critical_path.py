"""The critical path of one step, across ranks: what would have to be shorter for the step to be shorter.

The walk goes backward in time from the end of the step on the rank that ends last. Computation is followed
on its own rank. Where the rank waited for a collective, the walk follows the collective, through those it queued
behind, to the arrival of its last member, and goes on there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headway.diagnosis.breakdown import NS_A_MS, RankTime, Segment, segments
from headway.diagnosis.communication import Communications
from headway.trace.events import Kind
from headway.trace.format import Trace

TOLERANCE_NS = 200_000  # a waiter may be seen to wake up a little before the collective is seen to end
SLIVER_SHARE = 0.001  # of the step: shorter pieces join their neighbour of the same rank

_KINDS = {Kind.FORWARD_PASS: Kind.FORWARD, Kind.BACKWARD_PASS: Kind.BACKWARD}


@dataclass(frozen=True, slots=True)
class PathPiece:
    """A stretch of the critical path: what ``rank`` did. ``kind`` is an event's kind, or ``rest``."""

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


class _Found(NamedTuple):
    """An uncompacted piece."""

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
    """The critical path of the typical step, in time order. Its pieces are adjacent and add up to that step."""
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

    def back_from(self, rank: int) -> list[_Found]:
        """Walk from the end of the window on ``rank``; pieces in time order."""
        pieces: list[_Found] = []
        now = self._end_ns
        while now > self._start_ns:
            segment = self._segment(rank, now)
            awaited = self._awaited(rank, segment, now) if segment.kind == Kind.WAIT else None
            if awaited is None:
                pieces.append(_Found(rank, segment.kind, segment.name, segment.bucket, segment.start_ns, now))
                now = segment.start_ns
            else:
                now, rank = self._follow(rank, awaited, segment, now, pieces)
        return pieces[::-1]

    def _follow(
        self, rank: int, row: _Row, segment: Segment, now: int, pieces: list[_Found]
    ) -> tuple[int, int]:
        """Follow a collective, and those it queued behind, to an arrival; returns when, and on which rank."""
        if row.end_ns < now:  # it took the waiter this long to go on
            pieces.append(_Found(rank, Kind.WAIT, segment.name, segment.bucket, row.end_ns, now))
            now = row.end_ns
        while True:
            before = self._queued_behind(rank, row, now)
            begin = before.end_ns if before else min(max(row.arrival_ns, self._start_ns), now)
            if begin < now:
                pieces.append(_Found(rank, row.kind, row.name, row.bucket, max(begin, self._start_ns), now))
            now = max(begin, self._start_ns)
            if before is None or now == self._start_ns:
                return now, row.last_rank
            row = before

    def _segment(self, rank: int, now: int) -> Segment:
        if rank not in self._segments:
            self._segments[rank] = segments(self._trace.events[rank], self._start_ns, self._end_ns)
        found = self._segments[rank]
        low, high = 0, len(found) - 1
        while low < high:
            middle = (low + high) // 2
            if found[middle].end_ns >= now:
                high = middle
            else:
                low = middle + 1
        return found[low]

    def _awaited(self, rank: int, wait: Segment, now: int) -> _Row | None:
        """The collective whose end let the waiter go on: of those in flight, the last to end by then."""
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
        """The collective that kept ``row`` from starting although all its members had come, if one did."""
        earlier = [
            other
            for other in self._rows[rank]
            if row.arrival_ns < other.end_ns < now
            and other.end_ns <= row.start_ns + TOLERANCE_NS
            and other.enqueue_ns <= row.enqueue_ns
            and other != row
        ]
        return max(earlier, key=lambda other: other.end_ns, default=None)


def compact(pieces: list[_Found], sliver_ns: float) -> tuple[PathPiece, ...]:
    """Merge neighbours of one rank and kind, and let what is still a sliver join the piece before it."""
    merged: list[list[_Found]] = []
    for piece in pieces:
        piece = piece._replace(kind=_KINDS.get(piece.kind, piece.kind))
        if merged and _mergeable(merged[-1][0], piece):
            merged[-1].append(piece)
        else:
            merged.append([piece])
    runs: list[list[_Found]] = []
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


def _mergeable(a: _Found, b: _Found) -> bool:
    if (a.rank, a.kind) != (b.rank, b.kind):
        return False
    return a.kind not in (Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE) or a.name == b.name


def _name(run: list[_Found]) -> str:
    """One name for a run: its only name, or the longest one's and how many others there are.

    A run that is mostly outside of everything named, such as a forward between its modules, has no name.
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
    # The modules of a Sequential have numbers for names, which would read as counts.
    shown = f"'{longest}'" if longest.replace(".", "").isdecimal() else longest
    return f"{shown} and {len(lengths) - 1} more"
