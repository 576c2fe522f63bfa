"""Events moved from their own clock onto another."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from headway.arrays import Ints
from headway.trace.events import Events
from headway.trace.format import ClockFit


def aligned(events: Events, fit: ClockFit) -> Events:
    """The same events on the clock that ``fit`` brings them onto. What an event leaves out stays left out."""
    start_ns = aligned_ns(events.start_ns, fit)
    asked = events.enqueue_ns >= 0
    return replace(
        events,
        start_ns=start_ns,
        duration_ns=np.maximum(aligned_ns(events.end_ns, fit) - start_ns, 0),
        enqueue_ns=np.where(asked, aligned_ns(events.enqueue_ns, fit), -1),
    )


def aligned_ns(times_ns: Ints, fit: ClockFit) -> Ints:
    """Times on the clock that ``fit`` brings them onto, exact to the nanosecond however large they are."""
    # Whole nanoseconds are added as integers: the sum of a large offset and a small drift would be rounded.
    whole_ns = math.floor(fit.offset_ns)
    drift = fit.drift_ppm * 1e-6
    rest_ns = (fit.offset_ns - whole_ns) + drift * (times_ns - fit.reference_ns)
    moved: Ints = times_ns + (whole_ns + np.rint(rest_ns).astype(np.int64))
    return moved


def fit_through(reference_ns: int, base_ns: int, offset_ns: float, drift: float) -> ClockFit:
    """The fit that adds ``base_ns + offset_ns`` at ``reference_ns``, and ``drift`` for every nanosecond after it.

    Clocks of different epochs lie 2^60 ns apart, where floats are 256 ns apart. What the offset cannot hold is left to
    the drift: counted from another reference it adds exactly as much.
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
