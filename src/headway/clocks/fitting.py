"""Offsets and drifts of clocks from what they saw together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headway.arrays import Floats
from headway.clocks.aligning import ClockComponent, aligned_ns, components, fit_through
from headway.clocks.comparing import UNKNOWN_NS
from headway.clocks.linear_program import (
    FINEST_US,
    USUAL_US,
    Prior,
    Rows,
    Terms,
    apart_us,
    medians,
    rows_of,
    spreads_us,
    tightest,
    trusted_us,
    waited,
)
from headway.clocks.meetings import MESSAGE, Meetings
from headway.clocks.uncertainty import uncertainties_us
from headway.trace.format import ClockFit

FLAW = 8.0  # how many times the usual an end is off to be left out
DOUBTED = 0.2  # what share of a clock's rows may be left out without a doubt


# The estimate: a first linear programme to see what is far off, and a second one without it and with all bounds.
#
# Two things are known of clocks that met. The members of a collective end together, which says best how clocks stand when
# networks are steady, but is wrong by as much as one host is always slower to notice. And nobody who waits is through
# before the last has come, which bounds clocks from both sides; where these bounds are close, their middle is better than
# what ends say. The programme weighs the two, and what was known before.


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """Offsets, then drifts; the rows that they are from, and for each row by how much its end may be off.

    ``doubt_us`` says for each clock by how much it is off where more rows than a few had to be left out, else 0.
    """

    values: Floats
    rows: Rows
    spread_us: Floats
    doubt_us: Floats


def estimated(rows: Rows, priors: Sequence[Prior]) -> Estimate:
    """Offsets and drifts of the clocks of a component; the first one's are 0."""
    first = Terms(rows, USUAL_US + rows.took_us)
    first.put_ends()
    first.put_messages(waited(rows, np.zeros(2 * rows.clocks)))
    first.put_priors(priors, firmly=False)
    first.put_drifts()
    values = first.solve()
    every, sound = rows, _sound(rows, values)
    rows = every.where(sound)
    trusted = trusted_us(rows, spreads_us(rows, values))
    for _ in range(2):  # once more, for then it is seen better which bounds are the tightest
        second = Terms(rows, trusted)
        second.put_ends()
        second.put_bounds(tightest(rows, waited(rows, values)))
        second.put_priors(priors, firmly=True)
        second.put_drifts()
        values = second.solve()
    return Estimate(values, rows, spreads_us(rows, values), _doubt_us(every, sound, values))


def _sound(rows: Rows, values: Floats) -> npt.NDArray[np.bool_]:
    """Which rows are not far off: neither of another instance of the same collective nor mistimed."""
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
    """Bring ``clocks`` onto the first of them.

    ``prior`` is what is known of clocks already, by round trips say: how each is brought onto the first, to within its
    uncertainty. It is used together with what the meetings say. The uncertainty of a fit holds from the first to the
    last event of all clocks. A clock that cannot be held against the first, neither directly nor through others, has
    UNKNOWN_NS; such clocks are brought onto each other where they met. Meetings that contradict each other raise no
    error: the uncertainty grows. Raises UserError where scipy is missing.
    """
    known = {name: fit for name, fit in (prior or {}).items() if fit.uncertainty_ns < UNKNOWN_NS}
    meetings = _ordered(meetings, clocks)
    fits: dict[str, ClockFit] = {}
    index = {name: number for number, name in enumerate(meetings.clocks)}
    by_number = {index[name]: fit for name, fit in known.items() if name in index and name != clocks[0]}
    for number, component in enumerate(components(meetings, by_number)):
        for clock, fit in _fitted(meetings, component, by_number, known=number == 0):
            fits[meetings.clocks[clock]] = fit
    return {name: fits[name] for name in clocks}


def _ordered(meetings: Meetings, clocks: Sequence[str]) -> Meetings:
    """The same meetings, with clocks counted as in ``clocks``."""
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
    meetings: Meetings, component: ClockComponent, prior: Mapping[int, ClockFit], *, known: bool
) -> Iterator[tuple[int, ClockFit]]:
    """The fits of a component's clocks. ``known`` says that its first is the one that all are to be brought onto."""
    rows, middle_ns = rows_of(meetings, component)
    met = set(np.unique(rows.clock).tolist())
    priors = [
        _prior(number, prior[clock], base_ns, middle_ns, rows.half_us)
        for number, (clock, base_ns) in enumerate(zip(component.clocks, component.base_ns, strict=True))
        if known and number in met and clock in prior
    ]
    estimate = estimated(rows, priors)
    errors_us = uncertainties_us(estimate, priors, _ends(meetings, component, met, middle_ns, rows.half_us))
    for number, (clock, base_ns) in enumerate(zip(component.clocks, component.base_ns, strict=True)):
        sure = known and bool(np.isfinite(errors_us[number]))
        error_ns = min((errors_us[number] + FINEST_US) * 1e3, UNKNOWN_NS) if sure else UNKNOWN_NS
        if number == 0:
            yield clock, ClockFit(uncertainty_ns=0.0 if known else UNKNOWN_NS)
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
    """When the first and the last was recorded on clocks that met; -1 and 1 are the ends of their meetings."""
    first, last = -1.0, 1.0
    for number in met:
        clock, base_ns = component.clocks[number], component.base_ns[number]
        first = min(first, (int(meetings.first_ns[clock]) + base_ns - middle_ns) / (1e3 * half_us))
        last = max(last, (int(meetings.last_ns[clock]) + base_ns - middle_ns) / (1e3 * half_us))
    return first, last
