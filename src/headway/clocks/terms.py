"""What the linear programme weighs: ends, messages, bounds, priors and drifts, as terms of clocks' offsets and drifts.

Its unknowns are an offset for each clock (microseconds), a drift for each clock (microseconds from the middle of the
time to either end), and the common end of each meeting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.arrays import Floats, Indices
from headway.clocks.causality import Bounds, opposite
from headway.clocks.end_spread import FINEST_US
from headway.clocks.matching import LOOSE, MESSAGE
from headway.clocks.programme import Factors, Programme
from headway.clocks.rows import STRETCHES, Rows

MAX_DRIFT_PPM = 500.0
UNUSUAL_DRIFT_PPM = 100.0
USUAL_DRIFT_PPM = 50.0  # what quartz keeps to
UNUSUAL = 0.25  # what an unusual drift costs, against all else, of which half speaks for a true one
USUAL_US = 20.0  # what comparisons are off by at least
LOOSENESS = 10.0  # how much less an end counts where members end when they like
MESSAGE_US = 10_000.0  # a message counts as little as an end that may be off by this
# Costs against all else that is said of a clock: a bound outweighs a prior (which has two ends), and that ends.
BOUND = 3.0
PRIOR = 0.75
CENTRE = 2.0  # where bounds are no farther apart than so many spreads of ends, their middle outweighs ends


@dataclass(frozen=True, slots=True)
class Prior:
    """What is known of a clock of a component: what to add to its times at both ends of meetings, and how surely."""

    clock: int
    first_us: float
    last_us: float
    uncertainty_us: float


class Terms:
    """The terms of one programme over the rows of a component. ``trusted_us`` says how far each row's end is."""

    def __init__(self, rows: Rows, trusted_us: Floats) -> None:
        self._rows = rows
        self._programme = Programme(2 * rows.clocks + rows.meetings)
        self._ends = np.flatnonzero(rows.form != MESSAGE)
        self._weight = (1 / (trusted_us * np.where(rows.form == LOOSE, LOOSENESS, 1.0)))[self._ends]
        self._pull = np.bincount(rows.clock[self._ends], self._weight, rows.clocks).astype(np.float64)

    def solve(self) -> Floats:
        """Offsets, then drifts, of all clocks; the first one keeps its time."""
        clocks = self._rows.clocks
        return self._programme.solve(without=(0, clocks))[: 2 * clocks]

    def put_ends(self) -> None:
        """The members of a meeting end together."""
        rows, ends = self._rows, self._ends
        common = (2 * rows.clocks + rows.meeting[ends], np.full(len(ends), -1.0))
        # The common end is counted from one of the ends, for the sake of small numbers.
        since_us = rows.end_us[ends] - rows.end_us[rows.first][rows.meeting[ends]]
        moments = _moment(rows, ends, rows.end_us)
        self._programme.add(since_us, *moments, common, above=self._weight, below=self._weight)

    def put_messages(self, bounds: Bounds) -> None:
        """Messages come soon after they are sent, and never before: enough to see which cannot be true."""
        sent = bounds.where(self._rows.form[bounds.waiter] == MESSAGE)
        self._programme.add(*_slack(self._rows, sent), above=1 / MESSAGE_US, below=BOUND / MESSAGE_US)

    def put_bounds(self, bounds: Bounds) -> None:
        """Bounds cost much to break; and between bounds in both directions clocks are best in the middle."""
        rows = self._rows
        back = opposite(rows, bounds)
        both = np.flatnonzero(back >= 0)
        centre = np.zeros(len(back))
        centre[both] = self._centre(
            bounds.where(both), (bounds.slack_us[both] + bounds.slack_us[back[both]]) / 2
        )
        once = both[back[both] > both]
        forth, to = _slack(rows, bounds.where(once), 0.5), _slack(rows, bounds.where(back[once]), -0.5)
        self._programme.add(forth[0] + to[0], *forth[1:], *to[1:], above=centre[once], below=centre[once])
        np.add.at(self._pull, rows.clock[bounds.waiter[both]], centre[both])
        pull = np.bincount(rows.cell[self._ends], self._weight, minlength=rows.clocks * STRETCHES)
        below = BOUND * (pull[rows.cell[bounds.waiter]] + centre + 1 / MESSAGE_US)
        self._programme.add(*_slack(rows, bounds), above=1e-3 / MESSAGE_US, below=below)

    def _centre(self, bounds: Bounds, apart_us: Floats) -> Floats:
        """What it costs to be off the middle: as much for each end in that stretch, shared by a clock's partners."""
        rows, cells = self._rows, self._rows.clocks * STRETCHES
        own = rows.cell[bounds.waiter]
        other = rows.clock[bounds.holder] * STRETCHES + rows.stretch[bounds.waiter]
        ends = np.bincount(rows.cell[self._ends], minlength=cells)
        partners = np.bincount(own, minlength=cells)
        count = np.maximum(np.minimum(ends[own], ends[other]), 1) / np.maximum(partners[own], partners[other])
        centre: Floats = CENTRE * count / np.maximum(apart_us, FINEST_US)
        return centre

    def put_priors(self, priors: Sequence[Prior], *, firmly: bool) -> None:
        """A prior counts as one meeting; ``firmly`` beyond its uncertainty more than all ends, which come before."""
        if not priors:
            return
        clock = np.repeat([prior.clock for prior in priors], 2)
        place = np.tile([-1.0, 1.0], len(priors))
        known_us = np.array([us for prior in priors for us in (prior.first_us, prior.last_us)])
        surely_us = np.repeat([prior.uncertainty_us for prior in priors], 2)
        moment = (clock, np.ones(len(clock))), (self._rows.clocks + clock, place)
        weight = 1 / (surely_us + USUAL_US)
        self._programme.add(-known_us, *moment, above=weight, below=weight)
        if firmly:
            much = PRIOR * self._pull[clock] + weight
            self._programme.add(-known_us - surely_us, *moment, above=much)
            self._programme.add(-known_us + surely_us, *moment, below=much)

    def put_drifts(self) -> None:
        """Drifts cost a little, so that they are not made of noise; unusual ones much; and some no clock has."""
        rows = self._rows
        drift = rows.clocks + np.arange(1, rows.clocks)
        factor = (drift, np.ones(len(drift)))
        little = 1 / (USUAL_DRIFT_PPM * 1e-6 * rows.half_us + FINEST_US)
        self._programme.add(np.zeros(len(drift)), factor, above=little, below=little)
        unusual_us = np.full(len(drift), UNUSUAL_DRIFT_PPM * 1e-6 * rows.half_us)
        much: Floats = UNUSUAL * self._pull[1:]
        self._programme.add(-unusual_us, factor, above=much)
        self._programme.add(unusual_us, factor, below=much)
        limit_us = np.full(len(drift), MAX_DRIFT_PPM * 1e-6 * rows.half_us)
        self._programme.add(-limit_us, factor, above=np.inf)
        self._programme.add(limit_us, factor, below=np.inf)


def _moment(rows: Rows, picked: Indices, times_us: Floats, factor: float = 1.0) -> tuple[Factors, Factors]:
    """The unknown part of the times of some rows: their clocks' offsets and drifts."""
    clock, ones = rows.clock[picked], np.full(len(picked), factor)
    return (clock, ones), (rows.clocks + clock, factor * times_us[picked] / rows.half_us)


def _slack(
    rows: Rows, bounds: Bounds, factor: float = 1.0
) -> tuple[Floats, Factors, Factors, Factors, Factors]:
    """By how much waiters were through after those they waited for had come."""
    known_us = factor * (rows.end_us[bounds.waiter] - rows.arrival_us[bounds.holder])
    return (
        known_us,
        *_moment(rows, bounds.waiter, rows.end_us, factor),
        *_moment(rows, bounds.holder, rows.arrival_us, -factor),
    )
