"""Stragglers: the ranks that arrive last are blamed, never those with the longest phases.

A rank that is slow in its backward makes the backward of every other rank look just as long, because the others
wait there. What tells them apart is the arrival: while the others wait for a collective that lacks one member,
that member is to blame.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headway import intervals
from headway.arrays import Ints
from headway.diagnosis.breakdown import NS_A_MS
from headway.diagnosis.communication import Communications
from headway.diagnosis.timeline import REST, RankTime
from headway.trace.events import Kind

FLOOR_SHARE = 0.02  # of the step
FLOOR_MS = 0.5
LEAST_EXPLAINED = 0.1  # of the blame: a part of the work that explains less is not its cause
MAX_EXPLAINED = 200  # late arrivals, the costliest first, that are looked at to find the cause

CAUSES = ("forward", "backward", "input", "optimizer", REST)
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that others wait for.

    ``blame_ms`` is the time that the other ranks lose to it in each step, averaged over all of them. ``cause`` is the
    part of its work that is longer before its late arrivals and in its mean step, compared with the median of the other
    ranks, or ``unknown``; ``late_ms`` is by how much before its late arrivals. ``own_ms`` and ``others_ms`` are that
    part in a mean step, on it and (median) on the others.
    """

    rank: int
    blame_ms: float
    cause: str
    late_ms: float
    own_ms: float
    others_ms: float


class Blame(NamedTuple):
    """A stretch in which ``waiting`` waited for ``blamed`` to join an instance."""

    waiting: int
    blamed: int
    instance: int
    start_ns: int
    end_ns: int


def blames(times: dict[int, RankTime], communications: Communications) -> list[Blame]:
    """Say which rank every stretch of waiting for a straggler was for.

    A stretch belongs to the last rank to arrive at the collective in flight that is completed first. Where that rank
    was itself waiting for another at that time, the blame passes on.
    """
    direct = {rank: list(_direct(time, communications.of_rank(rank))) for rank, time in times.items()}
    starts = {
        rank: np.array([piece.start_ns for piece in pieces], dtype=np.int64)
        for rank, pieces in direct.items()
    }
    found: list[Blame] = []
    for pieces in direct.values():
        for piece in pieces:
            found.extend(_passed_on(piece, direct, starts, depth=len(times)))
    return found


def _direct(time: RankTime, own: Communications) -> Iterator[Blame]:
    """Cut this rank's waiting where collectives are requested or completed; the first to complete is awaited."""
    pending = own.where(own.arrival_ns > own.enqueue_ns)
    windows = intervals.union(time.step_start_ns, time.step_end_ns)
    waiting = intervals.intersect(time.straggling, windows)
    cuts = np.unique(np.concatenate([waiting.ravel(), pending.enqueue_ns, pending.arrival_ns]))
    lefts, rights = cuts[:-1], cuts[1:]
    picked = intervals.inside(waiting, lefts)
    order = np.argsort(pending.enqueue_ns, kind="stable").tolist()
    enqueues, arrivals = pending.enqueue_ns.tolist(), pending.arrival_ns.tolist()
    heap: list[tuple[int, int]] = []
    coming = 0
    for left, right in zip(lefts[picked].tolist(), rights[picked].tolist(), strict=True):
        while coming < len(order) and enqueues[order[coming]] <= left:
            heapq.heappush(heap, (arrivals[order[coming]], order[coming]))
            coming += 1
        while heap and heap[0][0] <= left:
            heapq.heappop(heap)
        if heap:
            row = heap[0][1]
            yield Blame(time.rank, int(pending.last_rank[row]), int(pending.instance[row]), left, right)


def _passed_on(
    piece: Blame, direct: dict[int, list[Blame]], starts: dict[int, Ints], depth: int
) -> Iterator[Blame]:
    """Hand on the stretches in which the blamed rank was itself waiting for another."""
    its = direct.get(piece.blamed, [])
    cursor = piece.start_ns
    index = max(int(np.searchsorted(starts[piece.blamed], piece.start_ns, side="right")) - 1, 0) if its else 0
    while depth > 0 and index < len(its) and its[index].start_ns < piece.end_ns:
        other = its[index]
        start, end = max(other.start_ns, piece.start_ns), min(other.end_ns, piece.end_ns)
        if end > start and other.blamed != piece.waiting:
            if start > cursor:
                yield piece._replace(start_ns=cursor, end_ns=start)
            nearer = Blame(piece.waiting, other.blamed, other.instance, start, end)
            yield from _passed_on(nearer, direct, starts, depth - 1)
            cursor = end
        index += 1
    if cursor < piece.end_ns:
        yield piece._replace(start_ns=cursor)


def find_stragglers(
    times: dict[int, RankTime],
    communications: Communications,
    found: list[Blame],
    *,
    step_ms: float,
    uncertainty_ms: float = 0.0,
) -> tuple[Straggler, ...]:
    """Name the ranks whose blame exceeds the noise, worst first.

    The floor is the largest of 2 % of the step, 0.5 ms and the clocks' uncertainty.
    """
    steps = len(next(iter(times.values())).step_start_ns)
    others = max(len(times) - 1, 1)
    floor_ms = max(FLOOR_SHARE * step_ms, FLOOR_MS, uncertainty_ms)
    result = []
    for rank in times:
        costs: dict[int, int] = {}
        for blame in found:
            if blame.blamed == rank:
                costs[blame.instance] = costs.get(blame.instance, 0) + blame.end_ns - blame.start_ns
        blame_ms = sum(costs.values()) / steps / others / NS_A_MS
        if blame_ms > floor_ms:
            result.append(_explained(rank, blame_ms, costs, times, communications))
    return tuple(sorted(result, key=lambda straggler: -straggler.blame_ms))


def _explained(
    rank: int, blame_ms: float, costs: dict[int, int], times: dict[int, RankTime], all_rows: Communications
) -> Straggler:
    """Compare what the straggler did before its late arrivals with what the others did before theirs."""
    barriers = _barriers(times, all_rows)
    own = all_rows.of_rank(rank)
    late = np.zeros(len(CAUSES))
    weight = 0
    for instance in sorted(costs, key=lambda one: -costs[one])[:MAX_EXPLAINED]:
        windows = _windows(instance, own, all_rows, barriers, times)
        if rank not in windows or len(windows) < 2:
            continue
        spent = {one: _spent(times[one], *window) for one, window in windows.items()}
        typical = np.median([parts for one, parts in spent.items() if one != rank], axis=0)
        late += costs[instance] * (spent[rank] - typical)
        weight += costs[instance]
    late_ms = late / max(weight, 1) / NS_A_MS
    means_ms = {one: np.array(_mean_parts(time)) / NS_A_MS for one, time in times.items()}
    others_ms = np.median([means for one, means in means_ms.items() if one != rank], axis=0)
    # What is longer before single late arrivals, but not in the mean step, is chance.
    explaining_ms = np.minimum(late_ms, means_ms[rank] - others_ms)
    late_ms[explaining_ms <= LEAST_EXPLAINED * blame_ms] = 0.0
    worst = int(np.argmax(late_ms))
    if late_ms[worst] <= 0:
        return Straggler(rank, blame_ms, UNKNOWN, 0.0, 0.0, 0.0)
    return Straggler(
        rank,
        blame_ms,
        CAUSES[worst],
        float(late_ms[worst]),
        float(means_ms[rank][worst]),
        float(others_ms[worst]),
    )


def _barriers(times: dict[int, RankTime], rows: Communications) -> Ints:
    """Instances that some rank blocked on, outside of backward: all ranks leave them together."""
    found = []
    for rank, time in times.items():
        own = rows.where((rows.rank == rank) & (rows.bucket < 0) & (rows.kind == Kind.COLLECTIVE))
        waited = intervals.length_within(time.wait, own.enqueue_ns, own.end_ns)
        found.append(own.instance[2 * waited > own.end_ns - own.enqueue_ns])
    return np.unique(np.concatenate(found)) if found else np.zeros(0, dtype=np.int64)


def _windows(
    instance: int, own: Communications, all_rows: Communications, barriers: Ints, times: dict[int, RankTime]
) -> dict[int, tuple[int, int]]:
    """For each member: from its arrival at the last point where all met before, to its arrival here.

    That point is the latest collective of the same group that belongs to an earlier step or that a rank blocked on;
    if there is none, it is the start of the first recorded step. ``own`` are the straggler's rows.
    """
    here = _enqueues(all_rows, instance)
    row = int(np.flatnonzero(own.instance == instance)[0])
    before = (own.group == own.group[row]) & (own.enqueue_ns < own.enqueue_ns[row])
    before &= (own.step < own.step[row]) | np.isin(own.instance, barriers)
    earlier = np.flatnonzero(before & (own.instance != instance))
    there: dict[int, int] = {}
    if len(earlier):
        there = _enqueues(all_rows, int(own.instance[earlier[np.argmax(own.enqueue_ns[earlier])]]))
    if not set(here) <= set(there):
        there = {one: int(times[one].step_start_ns.min()) for one in here}
    return {one: (there[one], end) for one, end in here.items() if there[one] < end}


def _enqueues(rows: Communications, instance: int) -> dict[int, int]:
    members = np.flatnonzero(rows.instance == instance)
    return dict(zip(rows.rank[members].tolist(), rows.enqueue_ns[members].tolist(), strict=True))


def _spent(time: RankTime, start_ns: int, end_ns: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """What one rank spent on each of CAUSES in a window, waits left out."""
    start, end = np.array([start_ns]), np.array([end_ns])
    parts = [
        int(intervals.length_within(spans, start, end)[0])
        for spans in (time.forward, time.backward, time.input, time.optimizer, time.wait)
    ]
    parts[-1] = end_ns - start_ns - sum(parts)
    return np.array(parts, dtype=np.float64)


def _mean_parts(time: RankTime) -> list[float]:
    """What one rank spends on each of CAUSES in a mean step."""
    parts = [
        float(time.per_step(spans).mean())
        for spans in (time.forward, time.backward, time.input, time.optimizer, time.wait)
    ]
    parts[-1] = float((time.step_end_ns - time.step_start_ns).mean()) - sum(parts)
    return parts
