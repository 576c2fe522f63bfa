"""The linear program that fits clocks: its rows (meetings), its terms, and its solver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headway.arrays import Flags, Floats, Indices
from headway.clocks.aligning import ClockComponent
from headway.clocks.meetings import LOOSE, MESSAGE, ON_DEVICES, TOGETHER, Meetings
from headway.errors import UserError, how_to_install


def medians(values: Floats, groups: Indices, weights: Floats, count: int, *, share: float = 0.5) -> Floats:
    """The weighted median, or the quantile ``share``, of each of ``count`` groups; nan for an empty group."""
    order = np.lexsort((values, groups))
    values, groups, weights = values[order], groups[order], weights[order]
    reached = np.cumsum(weights)
    first = np.searchsorted(groups, np.arange(count))
    last = np.searchsorted(groups, np.arange(count), side="right")
    before = np.where(first > 0, reached[first - 1], 0.0) if len(values) else np.zeros(count)
    result = np.full(count, np.nan)
    some = last > first
    wanted = before[some] * (1 - share) + reached[last[some] - 1] * share
    place = np.clip(np.searchsorted(reached, wanted), first[some], last[some] - 1)
    result[some] = values[place]
    return result


STRETCHES = 8  # the time is cut into this many, each with its own bounds, so that drifts show between them


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The meetings of one component's clocks, one row per clock and meeting.

    Times are microseconds from the middle of the time, after a rough alignment. The unknowns of a clock are its offset
    (us) and its drift (us from the middle to either end, which is ``half_us`` away).
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
        """The rows selected by ``picked``, without meetings left with one row; meetings are renumbered."""
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
        """For each row, how long its meeting took after all had arrived, by the clock of the last to arrive.

        If members need not wait for each other, it is as long as the slowest of them took.
        """
        own_us = np.maximum(self.end_us - self.arrival_us, 0.0)
        first = self.first
        least_us, most_us = np.minimum.reduceat(own_us, first), np.maximum.reduceat(own_us, first)
        together = np.isin(self.form[first], (TOGETHER, ON_DEVICES))
        took: Floats = np.where(together, least_us, most_us)[self.meeting]
        return took


def rows_of(meetings: Meetings, component: ClockComponent) -> tuple[Rows, int]:
    """The rows of a component's clocks, and the time on its first clock that is their zero."""
    place = np.full(len(meetings.clocks), -1, dtype=np.intp)
    place[list(component.clocks)] = np.arange(len(component.clocks))
    picked = np.flatnonzero(place[meetings.clock] >= 0)
    clock = place[meetings.clock[picked]]
    base_ns = np.array(component.base_ns, dtype=np.int64)[clock]
    arrival_ns, end_ns = meetings.arrival_ns[picked] + base_ns, meetings.end_ns[picked] + base_ns
    middle_ns = int(end_ns.min()) + (int(end_ns.max()) - int(end_ns.min())) // 2 if len(picked) else 0
    end_us = (end_ns - middle_ns) / 1e3
    half_us = max(float(np.abs(end_us).max(initial=0.0)), 1.0)
    _, meeting = np.unique(meetings.meeting[picked], return_inverse=True)
    rows = Rows(
        clocks=len(component.clocks),
        half_us=half_us,
        meeting=meeting,
        clock=clock,
        company=meetings.company[picked],
        # An arrival long before any end bounds nothing, however long before.
        arrival_us=np.clip((arrival_ns - middle_ns) / 1e3, -2 * half_us, 2 * half_us),
        end_us=end_us,
        holds=meetings.holds[picked],
        waits=meetings.waits[picked],
        form=meetings.form[picked],
    )
    return rows, middle_ns


MANY = 8  # from this many meetings on, the tightest bound is skipped as a possible outlier


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """Rows that waited for others: ``slack_us`` is how long after the holder's arrival the waiter ended."""

    waiter: Indices
    holder: Indices
    slack_us: Floats

    def where(self, picked: Flags | Indices) -> Bounds:
        """The bounds that ``picked`` picks."""
        return Bounds(self.waiter[picked], self.holder[picked], self.slack_us[picked])


def waited(rows: Rows, values: Floats) -> Bounds:
    """Every waiting row, with the last row to arrive of those that it waits for."""
    arrival_us = rows.arrival_us + rows.shift_us(values, rows.arrival_us)
    end_us = rows.end_us + rows.shift_us(values, rows.end_us)
    order = np.lexsort((-arrival_us, ~rows.holds, rows.meeting))
    last, second = order[rows.first][rows.meeting], order[rows.first + 1][rows.meeting]
    holder = np.where(last == np.arange(len(rows)), second, last)
    waiter = np.flatnonzero(rows.waits & rows.holds[holder])
    holder = holder[waiter]
    return Bounds(waiter, holder, end_us[waiter] - arrival_us[holder])


def tightest(rows: Rows, every: Bounds) -> Bounds:
    """The tightest bound for each pair of clocks, direction and stretch of time."""
    pair = (rows.clock[every.holder] * rows.clocks * STRETCHES) + rows.cell[every.waiter]
    order = np.lexsort((every.slack_us, pair))
    first = np.flatnonzero(np.diff(pair[order], prepend=-1))
    met = np.diff(np.append(first, len(order)))
    return every.where(order[first + (met >= MANY)])


def opposite(rows: Rows, bounds: Bounds) -> Indices:
    """The index of the bound for the same pair and stretch in the opposite direction, for each bound; -1 if none."""
    waiter, holder = rows.clock[bounds.waiter], rows.clock[bounds.holder]
    stretch = rows.stretch[bounds.waiter]
    key = (waiter * rows.clocks + holder) * STRETCHES + stretch
    back = (holder * rows.clocks + waiter) * STRETCHES + stretch
    order = np.argsort(key)
    place = np.minimum(np.searchsorted(key[order], back), len(key) - 1) if len(key) else key
    candidate = order[place]
    return np.where(key[candidate] == back, candidate, -1)


FINEST_US = 1.0  # the resolution of recorded times
SHARE = 0.1  # the share of a meeting's duration by which its ends may differ unnoticed


def off_by_us(rows: Rows, values: Floats) -> Floats:
    """How much later each end is than the median end of its meeting."""
    end_us = rows.end_us + rows.shift_us(values, rows.end_us)
    first = rows.first
    count = np.diff(np.append(first, len(rows)))
    order = np.lexsort((end_us, rows.meeting))
    low_us, high_us = end_us[order[first + (count - 1) // 2]], end_us[order[first + count // 2]]
    off: Floats = end_us - ((low_us + high_us) / 2)[rows.meeting]
    return off


def apart_us(rows: Rows, values: Floats) -> Floats:
    """How far each end is from the others of its meeting; with two clocks, twice the distance from their middle."""
    two = np.bincount(rows.meeting)[rows.meeting] == 2
    apart: Floats = np.abs(off_by_us(rows, values)) * np.where(two, 2.0, 1.0)
    return apart


def spreads_us(rows: Rows, values: Floats) -> Floats:
    """For each row, the usual deviation of ends in meetings of similar duration and the same form."""
    kind = np.log2(rows.took_us + FINEST_US).astype(np.intp) + 64 * rows.form.astype(np.intp)
    off_us = medians(np.abs(off_by_us(rows, values)), kind, np.ones(len(rows)), 256)
    # Twice, because with two clocks each is off by half of their distance.
    spread: Floats = 2 * 1.4826 * off_us[kind] + FINEST_US
    return spread


def trusted_us(rows: Rows, spread_us: Floats) -> Floats:
    """The assumed error of each end; its unnoticed part grows with the duration of the meeting."""
    trusted: Floats = spread_us + SHARE * rows.took_us
    return trusted


FARTHEST = 1e9  # constants are clipped to this
LEAST_COST, COST_UNIT = 1e-7, 1e4
LIMIT_S = 15.0  # time limit: on absurd numbers a solver may cycle

Factors = tuple[Indices, Floats]
"""One unknown of each term, and its coefficient."""


@dataclass(slots=True)
class LinearProgram:
    """Minimises a sum of terms, each linear in the unknowns, with costs per unit above and below zero.

    This is least absolute deviations: a few outliers have little influence. A term with a high cost on one side is a
    bound. The dual is solved, with a bounded variable per term and an equation per unknown, which is ten times faster.
    Unknowns are numbered; those in no term are 0.
    """

    unknowns: int
    _constants: list[Floats] = field(default_factory=list)
    _above: list[Floats] = field(default_factory=list)
    _below: list[Floats] = field(default_factory=list)
    _entries: list[tuple[Indices, Indices, Floats]] = field(default_factory=list)
    _terms: int = 0

    def add(
        self, constant: Floats, *factors: Factors, above: Floats | float = 0.0, below: Floats | float = 0.0
    ) -> None:
        """Add terms ``constant + Σ factor · unknown``, which cost ``above`` or ``below`` per unit above or below zero.

        An infinite cost is a hard bound. Its other side must cost nothing, and all hard bounds together be feasible.
        """
        term = self._terms + np.arange(len(constant))
        self._terms += len(constant)
        self._constants.append(constant)
        self._above.append(np.broadcast_to(above, constant.shape))
        self._below.append(np.broadcast_to(below, constant.shape))
        self._entries += [(unknown, term, factor) for unknown, factor in factors]

    def solve(self, without: tuple[int, ...] = ()) -> Floats:
        """Solve for the unknowns; those in ``without`` are fixed at 0.

        All are 0 if no solution is found in time. Raises UserError if scipy is missing.
        """
        try:
            from scipy.optimize import linprog  # type: ignore[import-untyped]
            from scipy.sparse import coo_matrix  # type: ignore[import-untyped]
        except ImportError:
            raise UserError(
                "aligning clocks needs scipy, which is not installed",
                fix=f"Run: {how_to_install('traces')}.",
            ) from None
        values = np.zeros(self.unknowns)
        if not self._terms or not self._entries:
            return values
        constants = np.clip(np.concatenate(self._constants), -FARTHEST, FARTHEST)
        above, below = _in_bounds(np.concatenate(self._above), np.concatenate(self._below))
        row, column, factor = (np.concatenate([entry[i] for entry in self._entries]) for i in range(3))
        free = ~np.isin(row, without)
        used, row = np.unique(row[free], return_inverse=True)
        factors = coo_matrix((factor[free], (row, column[free])), shape=(len(used), self._terms)).tocsr()
        for method in ("highs-ipm", "highs-ds"):  # the faster one first
            solution = linprog(
                -constants,
                A_eq=factors,
                b_eq=np.zeros(len(used)),
                bounds=np.column_stack([-below, above]),
                method=method,
                options={"time_limit": LIMIT_S},
            )
            if solution.status == 0:
                values[used] = solution.eqlin.marginals
                break
        return values


def _in_bounds(above: Floats, below: Floats) -> tuple[Floats, Floats]:
    """Scale the costs to a range that solvers handle well, raising the smallest to a small part of the largest."""
    dearest = max(float(cost[np.isfinite(cost)].max(initial=0.0)) for cost in (above, below)) or 1.0
    scaled = [
        np.where(cost > 0, np.maximum(cost / dearest, LEAST_COST), 0.0) * COST_UNIT for cost in (above, below)
    ]
    return scaled[0], scaled[1]


MAX_DRIFT_PPM = 500.0
UNUSUAL_DRIFT_PPM = 100.0
USUAL_DRIFT_PPM = 50.0  # the tolerance of quartz clocks
UNUSUAL = 0.25  # cost of an unusual drift, relative to all else; half of all else supports a true one
USUAL_US = 20.0  # the least error of any comparison
LOOSENESS = 10.0  # how much less an end counts if members do not end together
MESSAGE_US = 10_000.0  # a message counts as little as an end with this error
# Costs relative to all other terms of a clock: a bound outweighs a prior (which has two ends), and a prior all ends.
BOUND = 3.0
PRIOR = 0.75
CENTRE = 2.0  # if bounds are closer than this many spreads of ends, their middle outweighs ends


@dataclass(frozen=True, slots=True)
class Prior:
    """A known fit of a clock: what to add to its times at the first and last meeting, with its uncertainty."""

    clock: int
    first_us: float
    last_us: float
    uncertainty_us: float


class Terms:
    """The linear program for a component's clocks: terms for ends, messages, bounds, priors and drifts.

    The unknowns are each clock's offset (us), each clock's drift (us from the middle of the time to either end), and
    the common end of each meeting. ``trusted_us`` is the assumed error of each row's end.
    """

    def __init__(self, rows: Rows, trusted_us: Floats) -> None:
        self._rows = rows
        self._program = LinearProgram(2 * rows.clocks + rows.meetings)
        self._ends = np.flatnonzero(rows.form != MESSAGE)
        self._weight = (1 / (trusted_us * np.where(rows.form == LOOSE, LOOSENESS, 1.0)))[self._ends]
        self._pull = np.bincount(rows.clock[self._ends], self._weight, rows.clocks).astype(np.float64)

    def solve(self) -> Floats:
        """Offsets, then drifts, of all clocks; the first clock's are 0."""
        clocks = self._rows.clocks
        return self._program.solve(without=(0, clocks))[: 2 * clocks]

    def put_ends(self) -> None:
        """Add the terms by which the members of a meeting end together."""
        rows, ends = self._rows, self._ends
        common = (2 * rows.clocks + rows.meeting[ends], np.full(len(ends), -1.0))
        # The common end is relative to one of the ends, to keep numbers small.
        since_us = rows.end_us[ends] - rows.end_us[rows.first][rows.meeting[ends]]
        moments = _moment(rows, ends, rows.end_us)
        self._program.add(since_us, *moments, common, above=self._weight, below=self._weight)

    def put_messages(self, bounds: Bounds) -> None:
        """Add the terms by which messages arrive soon after they are sent, and never before: enough to see outliers."""
        sent = bounds.where(self._rows.form[bounds.waiter] == MESSAGE)
        self._program.add(*_slack(self._rows, sent), above=1 / MESSAGE_US, below=BOUND / MESSAGE_US)

    def put_bounds(self, bounds: Bounds) -> None:
        """Add the causal bounds, costly to violate, and a pull to the middle between bounds in both directions."""
        rows = self._rows
        back = opposite(rows, bounds)
        both = np.flatnonzero(back >= 0)
        centre = np.zeros(len(back))
        centre[both] = self._centre(
            bounds.where(both), (bounds.slack_us[both] + bounds.slack_us[back[both]]) / 2
        )
        once = both[back[both] > both]
        forth, to = _slack(rows, bounds.where(once), 0.5), _slack(rows, bounds.where(back[once]), -0.5)
        self._program.add(forth[0] + to[0], *forth[1:], *to[1:], above=centre[once], below=centre[once])
        np.add.at(self._pull, rows.clock[bounds.waiter[both]], centre[both])
        pull = np.bincount(rows.cell[self._ends], self._weight, minlength=rows.clocks * STRETCHES)
        below = BOUND * (pull[rows.cell[bounds.waiter]] + centre + 1 / MESSAGE_US)
        self._program.add(*_slack(rows, bounds), above=1e-3 / MESSAGE_US, below=below)

    def _centre(self, bounds: Bounds, apart_us: Floats) -> Floats:
        """The cost of being off the middle: in proportion to the ends in that stretch, divided by a clock's partners."""
        rows, cells = self._rows, self._rows.clocks * STRETCHES
        waiter_cell = rows.cell[bounds.waiter]
        holder_cell = rows.clock[bounds.holder] * STRETCHES + rows.stretch[bounds.waiter]
        ends = np.bincount(rows.cell[self._ends], minlength=cells)
        partners = np.bincount(waiter_cell, minlength=cells)
        count = np.maximum(np.minimum(ends[waiter_cell], ends[holder_cell]), 1) / np.maximum(
            partners[waiter_cell], partners[holder_cell]
        )
        centre: Floats = CENTRE * count / np.maximum(apart_us, FINEST_US)
        return centre

    def put_priors(self, priors: Sequence[Prior], *, firmly: bool) -> None:
        """Add the priors, each counting as one meeting. ``firmly``: beyond its uncertainty it outweighs all ends.

        The terms for ends and bounds must have been added before.
        """
        if not priors:
            return
        clock = np.repeat([prior.clock for prior in priors], 2)
        place = np.tile([-1.0, 1.0], len(priors))
        known_us = np.array([us for prior in priors for us in (prior.first_us, prior.last_us)])
        surely_us = np.repeat([prior.uncertainty_us for prior in priors], 2)
        moment = (clock, np.ones(len(clock))), (self._rows.clocks + clock, place)
        weight = 1 / (surely_us + USUAL_US)
        self._program.add(-known_us, *moment, above=weight, below=weight)
        if firmly:
            much = PRIOR * self._pull[clock] + weight
            self._program.add(-known_us - surely_us, *moment, above=much)
            self._program.add(-known_us + surely_us, *moment, below=much)

    def put_drifts(self) -> None:
        """Add the costs of drifts: low in general, to avoid fitting noise, high for unusual drifts, and a hard limit."""
        rows = self._rows
        drift = rows.clocks + np.arange(1, rows.clocks)
        factor = (drift, np.ones(len(drift)))
        little = 1 / (USUAL_DRIFT_PPM * 1e-6 * rows.half_us + FINEST_US)
        self._program.add(np.zeros(len(drift)), factor, above=little, below=little)
        unusual_us = np.full(len(drift), UNUSUAL_DRIFT_PPM * 1e-6 * rows.half_us)
        much: Floats = UNUSUAL * self._pull[1:]
        self._program.add(-unusual_us, factor, above=much)
        self._program.add(unusual_us, factor, below=much)
        limit_us = np.full(len(drift), MAX_DRIFT_PPM * 1e-6 * rows.half_us)
        self._program.add(-limit_us, factor, above=np.inf)
        self._program.add(limit_us, factor, below=np.inf)


def _moment(rows: Rows, picked: Indices, times_us: Floats, factor: float = 1.0) -> tuple[Factors, Factors]:
    """The factors of offset and drift in the times of the ``picked`` rows."""
    clock, ones = rows.clock[picked], np.full(len(picked), factor)
    return (clock, ones), (rows.clocks + clock, factor * times_us[picked] / rows.half_us)


def _slack(
    rows: Rows, bounds: Bounds, factor: float = 1.0
) -> tuple[Floats, Factors, Factors, Factors, Factors]:
    """The constant and factors of the bounds' slack: the waiter's end minus the holder's arrival."""
    known_us = factor * (rows.end_us[bounds.waiter] - rows.arrival_us[bounds.holder])
    return (
        known_us,
        *_moment(rows, bounds.waiter, rows.end_us, factor),
        *_moment(rows, bounds.holder, rows.arrival_us, -factor),
    )
