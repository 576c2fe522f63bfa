"""Meetings of one component of clocks in numbers small enough for floats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.arrays import Flags, Floats, Indices
from headway.clocks.components import ClockComponent
from headway.clocks.matching import ON_DEVICES, TOGETHER
from headway.clocks.meetings import Meetings

STRETCHES = 8  # of the time, each with bounds of its own, between which drifts show


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What the clocks of one component saw. Times are microseconds since the middle, after a rough alignment.

    Unknowns of a clock are its offset (us) and its drift (us from the middle to the ends, where ``half_us`` lies).
    """

    clocks: int
    half_us: float
    meeting: Indices
    clock: Indices  # of the component's
    company: Indices
    arrival_us: Floats
    end_us: Floats
    holds: Flags
    waits: Flags
    form: npt.NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.meeting)

    def where(self, picked: Flags) -> Rows:
        """The rows that ``picked`` picks, of meetings that still are between several; meetings are renumbered."""
        left = np.bincount(self.meeting[picked], minlength=self.meetings)
        picked = picked & (left[self.meeting] > 1)
        _, meeting = np.unique(self.meeting[picked], return_inverse=True)
        return Rows(
            self.clocks, self.half_us, meeting, self.clock[picked], self.company[picked], self.arrival_us[picked],
            self.end_us[picked], self.holds[picked], self.waits[picked], self.form[picked],
        )  # fmt: skip

    def shift_us(self, values: Floats, times_us: Floats) -> Floats:
        """What ``values`` (offsets, then drifts) add to the times of the rows."""
        shift: Floats = values[self.clock] + values[self.clocks + self.clock] * times_us / self.half_us
        return shift

    @property
    def meetings(self) -> int:
        """How many meetings there are."""
        return int(self.meeting[-1]) + 1 if len(self) else 0

    @property
    def first(self) -> Indices:
        """The first row of each meeting."""
        return np.flatnonzero(np.diff(self.meeting, prepend=-1))

    @property
    def stretch(self) -> Indices:
        """The stretch of time in which each row ended."""
        place = (self.end_us / self.half_us + 1) / 2 * STRETCHES
        return np.clip(place, 0, STRETCHES - 1).astype(np.intp)

    @property
    def cell(self) -> Indices:
        """A number for the clock and the stretch of time of each row."""
        cell: Indices = self.clock * STRETCHES + self.stretch
        return cell

    @property
    def took_us(self) -> Floats:
        """For each row how long its meeting took after all had arrived, by the clock of the last to arrive.

        Where members need not wait for each other it may have been as long as the longest of them took.
        """
        own_us = np.maximum(self.end_us - self.arrival_us, 0.0)
        first = self.first
        least_us, most_us = np.minimum.reduceat(own_us, first), np.maximum.reduceat(own_us, first)
        together = np.isin(self.form[first], (TOGETHER, ON_DEVICES))
        took: Floats = np.where(together, least_us, most_us)[self.meeting]
        return took


def rows_of(meetings: Meetings, component: ClockComponent) -> tuple[Rows, int]:
    """The rows of a component's clocks, and the time on its first clock from which they are counted."""
    place = np.full(len(meetings.clocks), -1, dtype=np.intp)
    place[list(component.clocks)] = np.arange(len(component.clocks))
    own = np.flatnonzero(place[meetings.clock] >= 0)
    clock = place[meetings.clock[own]]
    base_ns = np.array(component.base_ns, dtype=np.int64)[clock]
    arrival_ns, end_ns = meetings.arrival_ns[own] + base_ns, meetings.end_ns[own] + base_ns
    middle_ns = int(end_ns.min()) + (int(end_ns.max()) - int(end_ns.min())) // 2 if len(own) else 0
    end_us = (end_ns - middle_ns) / 1e3
    half_us = max(float(np.abs(end_us).max(initial=0.0)), 1.0)
    _, meeting = np.unique(meetings.meeting[own], return_inverse=True)
    rows = Rows(
        clocks=len(component.clocks),
        half_us=half_us,
        meeting=meeting,
        clock=clock,
        company=meetings.company[own],
        # Who came long before anything ended bounds nothing, however long before.
        arrival_us=np.clip((arrival_ns - middle_ns) / 1e3, -2 * half_us, 2 * half_us),
        end_us=end_us,
        holds=meetings.holds[own],
        waits=meetings.waits[own],
        form=meetings.form[own],
    )
    return rows, middle_ns
