"""Fits clocks' offsets and drifts, with uncertainties, to the meetings of their ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headway.arrays import Floats, Indices
from headway.clocks.aligning import ClockComponent, aligned_ns, components, fit_through
from headway.clocks.comparing import UNKNOWN_NS
from headway.clocks.linear_program import (
    FINEST_US,
    STRETCHES,
    USUAL_US,
    Prior,
    Rows,
    Terms,
    apart_us,
    medians,
    off_by_us,
    rows_of,
    spreads_us,
    tightest,
    trusted_us,
    waited,
)
from headway.clocks.meetings import MESSAGE, ON_DEVICES, TOGETHER, Meetings
from headway.trace.format import ClockFit

DRIFT_PPM = 100.0  # the largest drift between two clocks, where nothing else limits it


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """Limits on clock errors: at ``place``, the error of ``upper`` is at most ``most_us`` above that of ``lower``.

    ``place`` is a time, -1 at the beginning of all meetings and 1 at their end. A negative limit is violated by the
    estimate itself; its absolute value is used instead.
    """

    lower: Indices
    upper: Indices
    place: Floats
    most_us: Floats

    @classmethod
    def concatenated(cls, parts: list[Limits]) -> Limits:
        """All limits, one after another."""
        columns = ("lower", "upper", "place", "most_us")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in columns))


def errors_us(limits: Limits, nodes: int, ends: tuple[float, float], half_us: float) -> Floats:
    """The largest possible error of each node relative to node 0 between ``ends``; infinite if nothing limits it."""
    worst = np.zeros(nodes)
    for end in ends:
        lower, upper, most_us = _at(limits, nodes, end, DRIFT_PPM * 1e-6 * half_us)
        above = _shortest(lower, upper, most_us, nodes)
        below = _shortest(upper, lower, most_us, nodes)
        worst = np.maximum(worst, np.maximum(above, below))
    return worst


def _at(limits: Limits, nodes: int, end: float, drift_us: float) -> tuple[Indices, Indices, Floats]:
    """The limits of each pair of nodes at ``end``. As errors are linear in time, two places limit a third."""
    most_us, away = np.abs(limits.most_us), np.abs(end - limits.place)
    pair, number = np.unique(limits.lower * nodes + limits.upper, return_inverse=True)
    back = (pair % nodes) * nodes + pair // nodes
    reverse = np.minimum(np.searchsorted(pair, back), len(pair) - 1)
    opposite = np.where(pair[reverse] == back, reverse, -1)
    best_us = np.full(len(pair), np.inf)
    np.minimum.at(best_us, number, most_us + away * drift_us)
    near, far = _pairings(number, opposite)
    nearer = away[near] < away[far]
    near, far = near[nearer], far[nearer]
    reach_us = (most_us[near] * away[far] + most_us[far] * away[near]) / (away[far] - away[near])
    np.minimum.at(best_us, number[near], reach_us)
    return pair // nodes, pair % nodes, best_us


def _pairings(number: Indices, opposite: Indices) -> tuple[Indices, Indices]:
    """Pair every limit with every limit of the same two nodes in the opposite direction."""
    order = np.argsort(number, kind="stable")
    first = np.searchsorted(number[order], np.arange(len(opposite)))
    count = np.bincount(number, minlength=len(opposite))
    towards = opposite[number]
    some = np.flatnonzero(towards >= 0)
    repeats = count[towards[some]]
    near = np.repeat(some, repeats)
    within = np.arange(len(near)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    return near, order[np.repeat(first[towards[some]], repeats) + within]


def _shortest(origin: Indices, target: Indices, length_us: Floats, nodes: int) -> Floats:
    """The length of the shortest path from node 0 to each node (Bellman-Ford)."""
    way_us = np.full(nodes, np.inf)
    way_us[0] = 0.0
    for _ in range(nodes):
        longer = way_us.copy()
        np.minimum.at(way_us, target, way_us[origin] + length_us)
        if np.array_equal(longer, way_us):
            break
    return way_us


LATENCY_US = 200.0  # how long a thread may take to wake up after a message has arrived
DEVICE_LATENCY_US = 20.0  # how much later one kernel may see the end than another; both poll for it
SPREADS = 2.0  # how many spreads all ends of a clock may be off together, which nothing would show
FEW = 5  # fewer ends or bounds than this contradict nothing
MUCH = 0.25  # a larger share of violated bounds is not by chance


def uncertainties_us(estimate: Estimate, priors: Sequence[Prior], ends: tuple[float, float]) -> Floats:
    """The largest error of each clock between ``ends`` (-1 and 1 are those of the meetings); infinite if unknown."""
    rows, values = estimate.rows, estimate.values
    prior_limits = _Known.of(rows, values, priors)
    agreed = _Agreed.of(estimate)
    limits = Limits.concatenated([_bounds(rows, values), prior_limits.limits(), agreed.limits(rows.clocks)])
    nodes = rows.clocks + int(agreed.company.max(initial=-1)) + 1
    errors = errors_us(limits, nodes, ends, rows.half_us)[: rows.clocks]
    for clock, broken_us in (prior_limits.broken(), agreed.broken(), _broken_bounds(rows, values)):
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
    """Clocks whose causal bounds are violated in a large share of some stretch of time, and by how many us."""
    every = waited(rows, values)
    cell = rows.clock[every.holder] * rows.clocks * STRETCHES + rows.cell[every.waiter]
    cells, cell, met = np.unique(cell, return_inverse=True, return_counts=True)
    slack_us = medians(every.slack_us, cell, np.ones(len(cell)), len(cells), share=MUCH)
    broken = np.flatnonzero((slack_us < 0) & (met >= FEW))
    holder, waiter = cells[broken] // STRETCHES // rows.clocks, cells[broken] // STRETCHES % rows.clocks
    return np.concatenate([holder, waiter]), np.tile(-slack_us[broken], 2)


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """The priors' offsets relative to the estimate, at both ends of the time."""

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
    """Agreement of ends, for each clock, company (set of clocks that meet) and stretch of time.

    ``off_us`` is how much later than its company a clock saw the ends, ``each_us`` the uncertainty of that. A company
    is a node of its own, whose ends are the median of its clocks'.
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
        # In a ring, the last message reaches one member after another; nobody can wait longer than the whole took.
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
        # With two clocks, each is off by half of their distance.
        return self.clock[some], 2 * (np.abs(self.off_us) - self.each_us)[some]


def _unsteady_us(off_us: Floats, groups: Indices) -> Floats:
    """For each cell, the largest deviation of its group from the usual: that much may go unnoticed at any time."""
    names, group = np.unique(groups, return_inverse=True)
    usual_us = medians(off_us, group, np.ones(len(group)), len(names))
    most_us = np.zeros(len(names))
    np.maximum.at(most_us, group, np.abs(off_us - usual_us[group]))
    unsteady: Floats = most_us[group]
    return unsteady


FLAW = 8.0  # ends off by more than this many usual deviations are outliers
DOUBTED = 0.2  # the share of a clock's rows that may be outliers without casting doubt on the clock


# Clocks that met are related in two ways. The members of a collective end together, which is the better estimate on a
# steady network, but is biased if one host always notices the end later. And nobody who waits finishes before the last
# member has arrived, which bounds clocks from both sides; where bounds are close, their middle is the better estimate.
# A first linear program finds outliers; a second one, without them and with all bounds, weighs both and the priors.


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """Offsets, then drifts (``values``), the rows used, and each row's spread.

    ``doubt_us`` is, for each clock, how far off its outliers are if there were more than a few; else 0.
    """

    values: Floats
    rows: Rows
    spread_us: Floats
    doubt_us: Floats


def estimated(rows: Rows, priors: Sequence[Prior]) -> Estimate:
    """Estimate offsets and drifts of a component's clocks; the first clock's are 0."""
    first = Terms(rows, USUAL_US + rows.took_us)
    first.put_ends()
    first.put_messages(waited(rows, np.zeros(2 * rows.clocks)))
    first.put_priors(priors, firmly=False)
    first.put_drifts()
    values = first.solve()
    every, sound = rows, _sound(rows, values)
    rows = every.where(sound)
    trusted = trusted_us(rows, spreads_us(rows, values))
    for _ in range(2):  # twice, as a better estimate shows better which bounds are the tightest
        second = Terms(rows, trusted)
        second.put_ends()
        second.put_bounds(tightest(rows, waited(rows, values)))
        second.put_priors(priors, firmly=True)
        second.put_drifts()
        values = second.solve()
    return Estimate(values, rows, spreads_us(rows, values), _doubt_us(every, sound, values))


def _sound(rows: Rows, values: Floats) -> npt.NDArray[np.bool_]:
    """Which rows are not outliers, such as mistimed rows or rows matched to another instance of a collective."""
    far_us = FLAW * spreads_us(rows, values)
    together = apart_us(rows, values) <= far_us + rows.took_us
    sound: npt.NDArray[np.bool_] = together | (rows.form == MESSAGE)
    every = waited(rows, values)
    pairs, pair = np.unique(
        rows.clock[every.waiter] * rows.clocks + rows.clock[every.holder], return_inverse=True
    )
    usual_us = medians(np.abs(every.slack_us), pair, np.ones(len(pair)), len(pairs))[pair]
    early_us = np.where(rows.form[every.waiter] == MESSAGE, 2 * usual_us, far_us[every.waiter])
    sound[every.waiter[every.slack_us < -early_us]] = False
    return sound


def _doubt_us(rows: Rows, sound: npt.NDArray[np.bool_], values: Floats) -> Floats:
    every = waited(rows, values)
    off_us = apart_us(rows, values)
    message = rows.form[every.waiter] == MESSAGE
    off_us[every.waiter[message]] = np.abs(every.slack_us[message])
    lost_us = np.where(sound, 0.0, off_us)
    return np.nan_to_num(medians(lost_us, rows.clock, np.ones(len(rows)), rows.clocks, share=1 - DOUBTED))


def fit_clocks(
    meetings: Meetings, clocks: Sequence[str], *, prior: Mapping[str, ClockFit] | None = None
) -> dict[str, ClockFit]:
    """Align ``clocks`` with the first of them.

    ``prior`` holds fits to the first clock that are already known, by round trips for example, with their uncertainty;
    they are combined with the meetings. The uncertainty of a fit holds from the first to the last event of all clocks.
    A clock that cannot be compared with the first, directly or through others, has uncertainty UNKNOWN_NS; such clocks
    are aligned with each other if they met. Contradictory meetings raise no error, but increase the uncertainty.
    Raises UserError if scipy is missing.
    """
    usable = {name: fit for name, fit in (prior or {}).items() if fit.uncertainty_ns < UNKNOWN_NS}
    meetings = _ordered(meetings, clocks)
    fits: dict[str, ClockFit] = {}
    index = {name: number for number, name in enumerate(meetings.clocks)}
    by_number = {index[name]: fit for name, fit in usable.items() if name in index and name != clocks[0]}
    for number, component in enumerate(components(meetings, by_number)):
        for clock, fit in _fitted(meetings, component, by_number, has_reference=number == 0):
            fits[meetings.clocks[clock]] = fit
    return {name: fits[name] for name in clocks}


def _ordered(meetings: Meetings, clocks: Sequence[str]) -> Meetings:
    """Renumber the meetings' clocks in the order of ``clocks``."""
    names = tuple(dict.fromkeys([*clocks, *meetings.clocks]))
    index = {name: number for number, name in enumerate(names)}
    number = np.array([index[name] for name in meetings.clocks], dtype=np.intp)
    first_ns, last_ns = np.zeros(len(names), np.int64), np.zeros(len(names), np.int64)
    first_ns[number], last_ns[number] = meetings.first_ns, meetings.last_ns
    return replace(
        meetings,
        clocks=names,
        first_ns=first_ns,
        last_ns=last_ns,
        clock=number[meetings.clock] if len(meetings) else meetings.clock,
    )


def _fitted(
    meetings: Meetings, component: ClockComponent, prior: Mapping[int, ClockFit], *, has_reference: bool
) -> Iterator[tuple[int, ClockFit]]:
    """Fit the clocks of a component. ``has_reference``: its first clock is the reference that all are aligned with."""
    rows, middle_ns = rows_of(meetings, component)
    met = set(np.unique(rows.clock).tolist())
    priors = [
        _prior(number, prior[clock], base_ns, middle_ns, rows.half_us)
        for number, (clock, base_ns) in enumerate(zip(component.clocks, component.base_ns, strict=True))
        if has_reference and number in met and clock in prior
    ]
    estimate = estimated(rows, priors)
    errors_us = uncertainties_us(estimate, priors, _ends(meetings, component, met, middle_ns, rows.half_us))
    for number, (clock, base_ns) in enumerate(zip(component.clocks, component.base_ns, strict=True)):
        sure = has_reference and bool(np.isfinite(errors_us[number]))
        error_ns = min((errors_us[number] + FINEST_US) * 1e3, UNKNOWN_NS) if sure else UNKNOWN_NS
        if number == 0:
            yield clock, ClockFit(uncertainty_ns=0.0 if has_reference else UNKNOWN_NS)
        elif number in met:
            offset_us, moved_us = estimate.values[number], estimate.values[rows.clocks + number]
            fit = fit_through(
                middle_ns - base_ns, base_ns, float(offset_us) * 1e3, float(moved_us / rows.half_us)
            )
            yield clock, fit.model_copy(update={"uncertainty_ns": float(error_ns), "by": "causality"})
        else:
            yield clock, prior[clock]


def _prior(number: int, fit: ClockFit, base_ns: int, middle_ns: int, half_us: float) -> Prior:
    half_ns = round(half_us * 1e3)
    own_ns = np.array([middle_ns - base_ns - half_ns, middle_ns - base_ns + half_ns])
    first_us, last_us = ((aligned_ns(own_ns, fit) - own_ns - base_ns) / 1e3).tolist()
    return Prior(number, first_us, last_us, fit.uncertainty_ns / 1e3)


def _ends(
    meetings: Meetings, component: ClockComponent, met: set[int], middle_ns: int, half_us: float
) -> tuple[float, float]:
    """The first and last recorded time of clocks that met, where -1 and 1 are the ends of their meetings."""
    first, last = -1.0, 1.0
    for number in met:
        clock, base_ns = component.clocks[number], component.base_ns[number]
        first = min(first, (int(meetings.first_ns[clock]) + base_ns - middle_ns) / (1e3 * half_us))
        last = max(last, (int(meetings.last_ns[clock]) + base_ns - middle_ns) / (1e3 * half_us))
    return first, last
