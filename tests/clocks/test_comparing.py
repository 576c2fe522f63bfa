from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.clocks.aligning import aligned_ns
from headway.clocks.comparing import (
    ROUND_TRIPS,
    ClockServer,
    RoundTrip,
    fit_clock,
    measure_round_trips,
)
from headway.trace.format import ClockFit

SECOND = 1_000_000_000


def trips(at_ns: int, offset_ns: float, drift: float, delays_ns: list[tuple[int, int]]) -> list[RoundTrip]:
    """Round trips of a rank whose clock is behind rank 0's by ``offset + drift · t``."""
    made = []
    for there_ns, back_ns in delays_ns:
        server_ns = round(at_ns + there_ns + offset_ns + drift * (at_ns + there_ns))
        made.append(RoundTrip(at_ns, server_ns, at_ns + there_ns + back_ns))
    return made


def _aligned_ns(time_ns: int, fit: ClockFit) -> int:
    return int(aligned_ns(np.array([time_ns]), fit)[0])


delays = st.lists(
    st.tuples(st.integers(10_000, 300_000), st.integers(10_000, 300_000)), min_size=1, max_size=8
)


@given(offset_ms=st.floats(-50, 50), drift_ppm=st.floats(-50, 50), before=delays, after=delays)
def test_offset_and_drift_are_recovered_within_the_stated_uncertainty(
    offset_ms: float, drift_ppm: float, before: list[tuple[int, int]], after: list[tuple[int, int]]
) -> None:
    offset_ns, drift = offset_ms * 1e6, drift_ppm * 1e-6
    fit = fit_clock(trips(0, offset_ns, drift, before), trips(60 * SECOND, offset_ns, drift, after))
    for now_ns in (0, 30 * SECOND, 60 * SECOND):
        truth_ns = now_ns + offset_ns + drift * now_ns
        assert abs(_aligned_ns(now_ns, fit) - truth_ns) <= 1.01 * fit.uncertainty_ns + 100


def test_one_measurement_alone_gives_no_drift() -> None:
    fit = fit_clock(trips(0, 5e6, 0, [(1000, 1000)]), [])
    assert fit.drift_ppm == 0
    assert _aligned_ns(SECOND, fit) == SECOND + 5_000_000


SECRET = b"s" * 32


@pytest.mark.timeout(60)
def test_a_skewed_server_is_seen_over_a_real_connection() -> None:
    skew_ns = 42_000_000
    server = ClockServer("127.0.0.1", SECRET, 2, clock=lambda: time.monotonic_ns() + skew_ns)
    address = ("127.0.0.1", server.port)
    before = measure_round_trips(address, SECRET, last=False)
    assert not server.wait_for_last_rounds(1, timeout_s=0.01)
    after = measure_round_trips(address, SECRET, last=True)
    assert server.wait_for_last_rounds(1, timeout_s=5)
    server.close()
    fit = fit_clock(before, after)
    assert len(before) == len(after) == ROUND_TRIPS
    assert abs(fit.offset_ns - skew_ns) <= fit.uncertainty_ns
    assert fit.uncertainty_ns < 10_000_000


@pytest.mark.timeout(60)
def test_a_server_that_is_gone_or_of_another_job_gives_no_trips() -> None:
    server = ClockServer("127.0.0.1", SECRET, 2)
    address = ("127.0.0.1", server.port)
    assert measure_round_trips(address, b"t" * 32, last=True) == []
    assert not server.wait_for_last_rounds(1, timeout_s=0.01)
    server.close()
    assert measure_round_trips(address, SECRET, last=True) == []
