"""Offsets and drifts of clocks from what they saw together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from headway.clocks.aligning import aligned_ns, fit_through
from headway.clocks.comparing import UNKNOWN_NS
from headway.clocks.components import ClockComponent, components
from headway.clocks.end_spread import FINEST_US
from headway.clocks.estimate import estimated
from headway.clocks.meetings import Meetings
from headway.clocks.rows import rows_of
from headway.clocks.terms import Prior
from headway.clocks.uncertainty import uncertainties_us
from headway.trace.format import ClockFit


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
