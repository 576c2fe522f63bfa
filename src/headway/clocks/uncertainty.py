"""How wrong an estimate may be: what bounds, ends and priors leave open, and where they contradict it.

Bounds are certain, but leave open as much as messages take. Ends are no more than likely: all of one host's may be late
by as much as the fastest meetings took, which nothing would show, and by twice their spread. The narrower one counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.arrays import Floats, Indices
from headway.clocks.causality import tightest, waited
from headway.clocks.end_spread import off_by_us, trusted_us
from headway.clocks.estimate import Estimate
from headway.clocks.limits import Limits, errors_us
from headway.clocks.matching import ON_DEVICES, TOGETHER
from headway.clocks.quantiles import medians
from headway.clocks.rows import STRETCHES, Rows
from headway.clocks.terms import Prior

LATENCY_US = 200.0  # what waking up may take after a message has come
DEVICE_LATENCY_US = (
    20.0  # by how much a kernel may see the end later than another, which polls for it as well
)
SPREADS = 2.0  # how many times their spread ends may be off all alike, which nothing would show
FEW = 5  # ends or bounds that contradict nothing yet
MUCH = 0.25  # the share of bounds that are not broken by chance


def uncertainties_us(estimate: Estimate, priors: Sequence[Prior], ends: tuple[float, float]) -> Floats:
    """How wrong each clock may be between ``ends`` (-1 and 1: those of the meetings); infinite where nothing says."""
    rows, values = estimate.rows, estimate.values
    known = _Known.of(rows, values, priors)
    agreed = _Agreed.of(estimate)
    limits = Limits.concatenated([_bounds(rows, values), known.limits(), agreed.limits(rows.clocks)])
    nodes = rows.clocks + int(agreed.company.max(initial=-1)) + 1
    errors = errors_us(limits, nodes, ends, rows.half_us)[: rows.clocks]
    for clock, broken_us in (known.broken(), agreed.broken(), _broken_bounds(rows, values)):
        np.maximum.at(errors, clock, broken_us)
    errors = np.maximum(errors, estimate.doubt_us)
    errors[0] = 0.0
    return errors


def _bounds(rows: Rows, values: Floats) -> Limits:
    bounds = tightest(rows, waited(rows, values))
    waiter = bounds.waiter
    return Limits(
        rows.clock[waiter], rows.clock[bounds.holder], rows.end_us[waiter] / rows.half_us, bounds.slack_us
    )


def _broken_bounds(rows: Rows, values: Floats) -> tuple[Indices, Floats]:
    """Clocks by which, for a while, much that came after something came before it; and by how much."""
    every = waited(rows, values)
    cell = rows.clock[every.holder] * rows.clocks * STRETCHES + rows.cell[every.waiter]
    cells, cell, met = np.unique(cell, return_inverse=True, return_counts=True)
    slack_us = medians(every.slack_us, cell, np.ones(len(cell)), len(cells), share=MUCH)
    broken = np.flatnonzero((slack_us < 0) & (met >= FEW))
    holder, waiter = cells[broken] // STRETCHES // rows.clocks, cells[broken] // STRETCHES % rows.clocks
    return np.concatenate([holder, waiter]), np.tile(-slack_us[broken], 2)


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """Priors: by how much each is above the estimate at both ends."""

    clock: Indices
    place: Floats
    above_us: Floats
    surely_us: Floats

    @classmethod
    def of(cls, rows: Rows, values: Floats, priors: Sequence[Prior]) -> _Known:
        clock = np.repeat(np.array([prior.clock for prior in priors], dtype=np.intp), 2)
        place = np.tile([-1.0, 1.0], len(priors))
        known_us = np.array([us for prior in priors for us in (prior.first_us, prior.last_us)])
        above_us = known_us - values[clock] - place * values[rows.clocks + clock]
        return cls(clock, place, above_us, np.repeat([prior.uncertainty_us for prior in priors], 2))

    def limits(self) -> Limits:
        first = np.zeros(len(self.clock), dtype=np.intp)
        return Limits(
            np.concatenate([first, self.clock]),
            np.concatenate([self.clock, first]),
            np.tile(self.place, 2),
            np.concatenate([self.surely_us + self.above_us, self.surely_us - self.above_us]),
        )

    def broken(self) -> tuple[Indices, Floats]:
        return self.clock, np.abs(self.above_us) - self.surely_us


@dataclass(frozen=True, slots=True, eq=False)
class _Agreed:
    """Ends, a cell for each clock in each company and stretch of time: how far after the company's, and how surely.

    A company is a node of its own, whose ends are the median of its clocks'.
    """

    clock: Indices
    company: Indices
    count: Indices
    place: Floats
    off_us: Floats
    each_us: Floats

    @classmethod
    def of(cls, estimate: Estimate) -> _Agreed:
        together = np.isin(estimate.rows.form, (TOGETHER, ON_DEVICES))
        rows, spread_us = estimate.rows.where(together), estimate.spread_us[together]
        cell = rows.company * rows.clocks * STRETCHES + rows.cell
        cells, cell, count = np.unique(cell, return_inverse=True, return_counts=True)
        weight = 1 / trusted_us(rows, spread_us)
        members = np.bincount(rows.meeting)[rows.meeting]
        # In a ring the last message reaches members one after another; none can have waited longer than it all took.
        slowest_us = np.where(
            rows.form == ON_DEVICES, DEVICE_LATENCY_US, LATENCY_US + rows.took_us / np.maximum(members - 1, 1)
        )
        apart_us = np.minimum(rows.took_us, slowest_us)
        each_us = SPREADS * medians(spread_us, cell, weight, len(cells))
        each_us += medians(apart_us, cell, weight, len(cells)) / 2
        off_us = medians(off_by_us(rows, estimate.values), cell, weight, len(cells))
        _, company = np.unique(cells // STRETCHES // rows.clocks, return_inverse=True)
        return cls(
            clock=cells // STRETCHES % rows.clocks,
            company=company,
            count=count,
            place=np.bincount(cell, rows.end_us / rows.half_us) / count,
            off_us=off_us,
            each_us=each_us + _unsteady_us(off_us, cells // STRETCHES),
        )

    def limits(self, clocks: int) -> Limits:
        company = clocks + self.company
        return Limits(
            np.concatenate([company, self.clock]),
            np.concatenate([self.clock, company]),
            np.tile(self.place, 2),
            np.concatenate([self.each_us - self.off_us, self.each_us + self.off_us]),
        )

    def broken(self) -> tuple[Indices, Floats]:
        some = self.count >= FEW
        # Of two clocks each is off by half of what they are apart.
        return self.clock[some], 2 * (np.abs(self.off_us) - self.each_us)[some]


def _unsteady_us(off_us: Floats, groups: Indices) -> Floats:
    """For each cell by how much ends are off at one time more than they usually are: so much may pass unseen at any."""
    names, group = np.unique(groups, return_inverse=True)
    usual_us = medians(off_us, group, np.ones(len(group)), len(names))
    most_us = np.zeros(len(names))
    np.maximum.at(most_us, group, np.abs(off_us - usual_us[group]))
    unsteady: Floats = most_us[group]
    return unsteady
