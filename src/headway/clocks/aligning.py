"""Converts times between clocks, and finds which clocks can be compared at all."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from headway.arrays import Ints
from headway.clocks.meetings import MESSAGE, Meetings
from headway.trace.events import Events
from headway.trace.format import ClockFit


def aligned(events: Events, fit: ClockFit) -> Events:
    """Convert events to the reference clock of ``fit``. Missing times (-1) stay missing."""
    start_ns = aligned_ns(events.start_ns, fit)
    has_enqueue = events.enqueue_ns >= 0
    return replace(
        events,
        start_ns=start_ns,
        duration_ns=np.maximum(aligned_ns(events.end_ns, fit) - start_ns, 0),
        enqueue_ns=np.where(has_enqueue, aligned_ns(events.enqueue_ns, fit), -1),
    )


def aligned_ns(times_ns: Ints, fit: ClockFit) -> Ints:
    """Convert times (ns) to the reference clock of ``fit``, exact to the nanosecond however large they are."""
    # Whole nanoseconds are added as integers: the sum of a large offset and a small drift would be rounded.
    whole_ns = math.floor(fit.offset_ns)
    drift = fit.drift_ppm * 1e-6
    rest_ns = (fit.offset_ns - whole_ns) + drift * (times_ns - fit.reference_ns)
    moved: Ints = times_ns + (whole_ns + np.rint(rest_ns).astype(np.int64))
    return moved


def fit_through(reference_ns: int, base_ns: int, offset_ns: float, drift: float) -> ClockFit:
    """The fit that adds ``base_ns + offset_ns`` at ``reference_ns``, and ``drift`` ns for every nanosecond after it.

    Clocks of different epochs are 2^60 ns apart, where floats have a spacing of 256 ns. The remainder that the offset
    cannot hold is expressed by moving the reference: from there, the drift adds exactly as much.
    """
    whole_ns = base_ns + round(offset_ns)
    if abs(whole_ns) >= _EXACT_NS:
        left_ns = whole_ns - int(float(whole_ns)) + (offset_ns - round(offset_ns))
        drift = math.copysign(max(abs(drift), _LEAST_DRIFT), drift)
        reference_ns -= round(left_ns / drift)
        return ClockFit(offset_ns=float(whole_ns), drift_ppm=drift * 1e6, reference_ns=reference_ns)
    return ClockFit(offset_ns=base_ns + offset_ns, drift_ppm=drift * 1e6, reference_ns=reference_ns)


_EXACT_NS = 2**50  # a float of this size holds quarters of a nanosecond
_LEAST_DRIFT = 1e-13  # a third of a nanosecond in an hour


_FARTHEST_NS = 2**62  # largest distance of clocks; absurd times are clipped rather than refused


@dataclass(frozen=True, slots=True, eq=False)
class ClockComponent:
    """Clocks that can be compared with each other, directly or through others; the first is their reference."""

    clocks: tuple[int, ...]
    base_ns: tuple[int, ...]  # what to add to each clock's times, roughly


def components(meetings: Meetings, prior: Mapping[int, ClockFit]) -> list[ClockComponent]:
    """Group all clocks into components, that of clock 0 first. ``prior`` holds known fits to clock 0."""
    visited: set[int] = set()
    connected = []
    for first in range(len(meetings.clocks)):
        if first in visited:
            continue
        component = {first: 0}
        _follow(meetings, component, first)
        if first == 0:
            for clock, fit in prior.items():
                if clock not in component:
                    component[clock] = _base_ns(meetings, clock, fit)
                    _follow(meetings, component, clock)
        visited.update(component)
        connected.append(ClockComponent(tuple(component), tuple(component.values())))
    return connected


def _base_ns(meetings: Meetings, clock: int, fit: ClockFit) -> int:
    middle_ns = (int(meetings.first_ns[clock]) + int(meetings.last_ns[clock])) // 2
    return int(aligned_ns(np.array([middle_ns]), fit)[0]) - middle_ns


def _follow(meetings: Meetings, component: dict[int, int], first: int) -> None:
    """Add to ``component`` all clocks that met ``first``, directly or through others."""
    waiting = deque([first])
    while waiting:
        clock = waiting.popleft()
        for neighbour, ahead_ns in _neighbours(meetings, clock, component):
            component[neighbour] = min(max(component[clock] + ahead_ns, -_FARTHEST_NS), _FARTHEST_NS)
            waiting.append(neighbour)


def _neighbours(meetings: Meetings, clock: int, visited: Mapping[int, int]) -> list[tuple[int, int]]:
    """The clocks outside ``visited`` that ``clock`` met, and by how many ns it is ahead of each (the median)."""
    rows_here = np.flatnonzero(meetings.clock == clock)
    row_here = np.full(int(meetings.meeting[-1]) + 1 if len(meetings) else 0, -1, dtype=np.intp)
    row_here[meetings.meeting[rows_here]] = rows_here
    rows = np.flatnonzero(row_here[meetings.meeting] >= 0)
    rows = rows[~np.isin(meetings.clock[rows], list(visited))]
    sent = (meetings.form == MESSAGE) & meetings.holds
    moment_ns: Ints = np.where(sent, meetings.arrival_ns, meetings.end_ns)
    ahead_ns = moment_ns[row_here[meetings.meeting[rows]]] - moment_ns[rows]
    order = np.lexsort((ahead_ns, meetings.clock[rows]))
    neighbours, first, count = np.unique(meetings.clock[rows][order], return_index=True, return_counts=True)
    middle_ns = ahead_ns[order[first + count // 2]]
    return list(zip(neighbours.tolist(), middle_ns.tolist(), strict=True))
