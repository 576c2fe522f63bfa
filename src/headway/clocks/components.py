"""Clocks that met, directly or through others, brought roughly onto one, so that what is left are small numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headway.arrays import Ints
from headway.clocks.aligning import aligned_ns
from headway.clocks.matching import MESSAGE
from headway.clocks.meetings import Meetings
from headway.trace.format import ClockFit

_FARTHEST_NS = 2**62  # apart: beyond that times are no times, but no reason to fail


@dataclass(frozen=True, slots=True, eq=False)
class ClockComponent:
    """Clocks that can be held against each other, the one that the others are brought onto first."""

    clocks: tuple[int, ...]
    base_ns: tuple[int, ...]  # what to add to each clock's times, roughly


def components(meetings: Meetings, prior: Mapping[int, ClockFit]) -> list[ClockComponent]:
    """All clocks in components, clock 0's first. ``prior`` holds what is known of clocks against clock 0."""
    found: set[int] = set()
    made = []
    for first in range(len(meetings.clocks)):
        if first in found:
            continue
        component = {first: 0}
        _follow(meetings, component, first)
        if first == 0:
            for clock, fit in prior.items():
                if clock not in component:
                    component[clock] = _base_ns(meetings, clock, fit)
                    _follow(meetings, component, clock)
        found.update(component)
        made.append(ClockComponent(tuple(component), tuple(component.values())))
    return made


def _base_ns(meetings: Meetings, clock: int, fit: ClockFit) -> int:
    middle_ns = (int(meetings.first_ns[clock]) + int(meetings.last_ns[clock])) // 2
    return int(aligned_ns(np.array([middle_ns]), fit)[0]) - middle_ns


def _follow(meetings: Meetings, component: dict[int, int], first: int) -> None:
    """Put the clocks into ``component`` that met ``first``, those that met these, and so on."""
    waiting = deque([first])
    while waiting:
        clock = waiting.popleft()
        for other, ahead_ns in _neighbours(meetings, clock, component):
            component[other] = min(max(component[clock] + ahead_ns, -_FARTHEST_NS), _FARTHEST_NS)
            waiting.append(other)


def _neighbours(meetings: Meetings, clock: int, known: Mapping[int, int]) -> list[tuple[int, int]]:
    """The clocks that ``clock`` met and that are not ``known``, and by how much it is ahead of each: the median."""
    own = np.flatnonzero(meetings.clock == clock)
    own_row = np.full(int(meetings.meeting[-1]) + 1 if len(meetings) else 0, -1, dtype=np.intp)
    own_row[meetings.meeting[own]] = own
    rows = np.flatnonzero(own_row[meetings.meeting] >= 0)
    rows = rows[~np.isin(meetings.clock[rows], list(known))]
    sent = (meetings.form == MESSAGE) & meetings.holds
    moment_ns: Ints = np.where(sent, meetings.arrival_ns, meetings.end_ns)
    ahead_ns = moment_ns[own_row[meetings.meeting[rows]]] - moment_ns[rows]
    order = np.lexsort((ahead_ns, meetings.clock[rows]))
    others, first, count = np.unique(meetings.clock[rows][order], return_index=True, return_counts=True)
    middle_ns = ahead_ns[order[first + count // 2]]
    return list(zip(others.tolist(), middle_ns.tolist(), strict=True))
