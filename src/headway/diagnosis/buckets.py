"""Measures gradient buckets: when their gradients are ready, when they launch, and how much of them is exposed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np

from headway import intervals
from headway.arrays import Flags, Ints
from headway.diagnosis.breakdown import NS_A_MS, RankTime
from headway.diagnosis.communication import Communications
from headway.trace.events import Events, Kind
from headway.trace.format import Trace


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """One collective of one gradient bucket, averaged over ranks and steps. Times are ms from the start of the step.

    ``parameters`` are in DDP's order, and empty if the recording does not list them. Their gradients become ready
    between ``first_ready_ms`` and ``last_ready_ms``, which are None if not recorded. The collective is launched at
    ``launch_ms`` and ends at ``end_ms``. ``exposed_ms`` is how long computation waits for it per step.
    """

    bucket: int
    collective: str
    parameters: tuple[str, ...]
    size_bytes: int
    first_ready_ms: float | None
    last_ready_ms: float | None
    launch_ms: float
    end_ms: float
    exposed_ms: float

    def to_document(self) -> dict[str, Any]:
        """As ``headway diagnose --json`` prints it."""
        return {
            "bucket": self.bucket,
            "collective": self.collective,
            "parameters": list(self.parameters),
            "size_bytes": self.size_bytes,
            "first_ready_ms": None if self.first_ready_ms is None else round(self.first_ready_ms, 6),
            "last_ready_ms": None if self.last_ready_ms is None else round(self.last_ready_ms, 6),
            "launch_ms": round(self.launch_ms, 6),
            "end_ms": round(self.end_ms, 6),
            "exposed_ms": round(self.exposed_ms, 6),
        }


def bucket_times(
    trace: Trace, times: Mapping[int, RankTime], rows: Communications
) -> tuple[BucketTimes, ...]:
    """The gradient buckets of a job in launch order; empty if none were recorded."""
    carrying = (rows.bucket >= 0) & (rows.kind == Kind.COLLECTIVE)
    if not carrying.any():
        return ()
    members = max((info.buckets for info in trace.manifest.ranks), key=len, default=())
    keys = sorted(set(zip(rows.bucket[carrying].tolist(), rows.name[carrying].tolist(), strict=True)))
    sums = _Sums(keys)
    ready = _Ready(members)
    for rank, time in times.items():
        rank_rows = rows.of_rank(rank)
        sums.add(time, rank_rows, exposed_ns(time, rank_rows))
        if members:
            ready.add(time, trace.events[rank])
    buckets = sums.rows(members, ready)
    return tuple(sorted(buckets, key=lambda row: (row.launch_ms, row.bucket)))


class _Sums:
    """Accumulates the times of each bucket's collective over ranks and steps."""

    def __init__(self, keys: Sequence[tuple[int, str]]) -> None:
        self._number = {key: number for number, key in enumerate(keys)}
        self._count, self._launch, self._end, self._exposed, self._steps = np.zeros((5, len(keys)))
        self._size = np.zeros(len(keys), dtype=np.int64)

    def add(self, time: RankTime, rank_rows: Communications, exposed: Ints) -> None:
        """Adds one rank's rows; ``exposed`` is how long computation waited for each, in ns."""
        within, step = in_steps(time, rank_rows.enqueue_ns)
        within &= (rank_rows.bucket >= 0) & (rank_rows.kind == Kind.COLLECTIVE)
        start_ns = time.step_start_ns[step[within]]
        pairs = zip(rank_rows.bucket[within].tolist(), rank_rows.name[within].tolist(), strict=True)
        at = np.array([self._number[pair] for pair in pairs], dtype=np.int64)
        np.add.at(self._count, at, 1)
        np.add.at(self._launch, at, rank_rows.enqueue_ns[within] - start_ns)
        np.add.at(self._end, at, rank_rows.end_ns[within] - start_ns)
        np.add.at(self._exposed, at, exposed[within])
        np.maximum.at(self._size, at, rank_rows.size_bytes[within])
        self._steps += len(time.step_start_ns)

    def rows(self, members: Sequence[tuple[str, ...]], ready: _Ready) -> list[BucketTimes]:
        """The mean per bucket. Rows outside the recorded steps are left out."""
        buckets = []
        for (bucket, collective), at in self._number.items():
            count = float(self._count[at])
            if not count:
                continue
            first_ms, last_ms = ready.of(bucket)
            buckets.append(
                BucketTimes(
                    bucket=bucket,
                    collective=collective,
                    parameters=members[bucket] if bucket < len(members) else (),
                    size_bytes=int(self._size[at]),
                    first_ready_ms=first_ms,
                    last_ready_ms=last_ms,
                    launch_ms=float(self._launch[at]) / count / NS_A_MS,
                    end_ms=float(self._end[at]) / count / NS_A_MS,
                    exposed_ms=float(self._exposed[at] / self._steps[at]) / NS_A_MS,
                )
            )
        return buckets


class _Ready:
    """Accumulates when each bucket's first and last gradient are ready, over ranks and steps."""

    def __init__(self, members: Sequence[tuple[str, ...]]) -> None:
        self._bucket_of = {name: bucket for bucket, names in enumerate(members) for name in names}
        self._first, self._last, self._count = np.zeros((3, len(members)))

    def add(self, time: RankTime, events: Events) -> None:
        """Adds one rank's steps."""
        ready = events.of_kind(Kind.GRADIENT_READY)
        within, step = in_steps(time, ready.start_ns)
        bucket = np.array([self._bucket_of.get(name, -1) for name in ready.name.tolist()], dtype=np.int64)
        within &= bucket >= 0
        since = (ready.start_ns - time.step_start_ns[step])[within].astype(np.float64)
        shape = (len(time.step_start_ns), len(self._count))
        first, last = np.full(shape, np.inf), np.full(shape, -np.inf)
        np.minimum.at(first, (step[within], bucket[within]), since)
        np.maximum.at(last, (step[within], bucket[within]), since)
        seen = np.isfinite(first)
        self._first += np.where(seen, first, 0.0).sum(axis=0)
        self._last += np.where(seen, last, 0.0).sum(axis=0)
        self._count += seen.sum(axis=0)

    def of(self, bucket: int) -> tuple[float | None, float | None]:
        """The mean times of a bucket's first and last gradient in ms; None if they were not recorded."""
        if bucket >= len(self._count) or not self._count[bucket]:
            return None, None
        count = float(self._count[bucket]) * NS_A_MS
        return float(self._first[bucket]) / count, float(self._last[bucket]) / count


def in_steps(time: RankTime, moments: Ints) -> tuple[Flags, Ints]:
    """Whether each moment lies in a recorded step, and the index of the last step that began before it."""
    step = np.maximum(np.searchsorted(time.step_start_ns, moments, side="right") - 1, 0)
    return (moments >= time.step_start_ns[step]) & (moments < time.step_end_ns[step]), step


def exposed_ns(time: RankTime, rank_rows: Communications) -> Ints:
    """How long computation waited for each of a rank's rows, in ns. The sum is the rank's exposed communication.

    While several rows are in flight, time counts for the one that ends first: the others queue behind it.
    """
    exposed = np.zeros(len(rank_rows), dtype=np.int64)
    if not len(rank_rows) or not len(time.exposed):
        return exposed
    moments = np.unique(np.concatenate([rank_rows.arrival_ns, rank_rows.end_ns]))
    begins = np.argsort(rank_rows.arrival_ns, kind="stable").tolist()
    arrivals, ends = rank_rows.arrival_ns.tolist(), rank_rows.end_ns.tolist()
    in_flight: list[tuple[int, int]] = []
    holder = np.full(len(moments) - 1, -1, dtype=np.int64)
    begun = 0
    for at, moment in enumerate(moments[:-1].tolist()):
        while begun < len(begins) and arrivals[begins[begun]] <= moment:
            heappush(in_flight, (ends[begins[begun]], begins[begun]))
            begun += 1
        while in_flight and in_flight[0][0] <= moment:
            heappop(in_flight)
        if in_flight:
            holder[at] = in_flight[0][1]
    waited = intervals.length_within(time.exposed, moments[:-1], moments[1:])
    np.add.at(exposed, holder[holder >= 0], waited[holder >= 0])
    return exposed
