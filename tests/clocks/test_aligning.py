from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.clocks import aligned
from headway.clocks.aligning import aligned_ns, fit_through
from headway.trace.events import Event, Events, Kind, Stream
from headway.trace.format import ClockFit


@given(
    st.lists(st.integers(0, 10**15), min_size=1),
    st.floats(-1e9, 1e9),
    st.floats(-500, 500),
    st.integers(0, 10**15),
)
def test_times_are_aligned_exactly(
    times: list[int], offset_ns: float, drift_ppm: float, reference_ns: int
) -> None:
    fit = ClockFit(offset_ns=offset_ns, drift_ppm=drift_ppm, reference_ns=reference_ns)
    found = aligned_ns(np.array(times), fit).tolist()
    for moved_ns, time_ns in zip(found, times, strict=True):
        drifted = Fraction(drift_ppm) / 10**6 * (time_ns - reference_ns)
        assert abs(moved_ns - (time_ns + Fraction(offset_ns) + drifted)) <= 1


@given(
    base_ns=st.integers(-(2**62), 2**62),
    offset_ns=st.floats(-1e8, 1e8),
    drift=st.one_of(st.just(0.0), st.floats(-5e-4, 5e-4)),
    since_ns=st.integers(-60 * 10**9, 60 * 10**9),
    own_ns=st.integers(0, 2**61),
)
def test_a_fit_is_exact_however_far_epochs_lie_apart(
    base_ns: int, offset_ns: float, drift: float, since_ns: int, own_ns: int
) -> None:
    fit = fit_through(own_ns, base_ns, offset_ns, drift)
    time_ns = own_ns + since_ns
    if abs(time_ns + base_ns) >= 2**63 or time_ns < 0:
        return
    exact = time_ns + base_ns + Fraction(offset_ns) + Fraction(drift) * since_ns
    assert abs(int(aligned_ns(np.array([time_ns]), fit)[0]) - exact) <= 2


def test_events_keep_their_order_and_what_they_leave_out() -> None:
    rows = [
        Event(Kind.COLLECTIVE, "all_reduce", Stream.COMMUNICATION, 0, 1000 + i, 500, enqueue_ns=900 - i)
        for i in range(5)
    ]
    rows.append(Event(Kind.FORWARD, "layer", Stream.COMPUTE, 0, 2000, 1))
    moved = aligned(Events.from_rows(rows), ClockFit(offset_ns=250.5, drift_ppm=500.0, reference_ns=1000))
    assert moved.enqueue_ns.tolist() == [1150, 1149, 1148, 1147, 1146, -1]
    assert (np.diff(moved.start_ns) >= 0).all()
    assert moved.name.tolist() == ["all_reduce"] * 5 + ["layer"]
    assert set(moved.duration_ns.tolist()) <= {500, 501, 1, 2}
