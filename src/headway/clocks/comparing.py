"""Compares every rank's monotonic clock with rank 0's by round trips.

A round trip sent at ``a`` and received at ``b`` (local times), answered with rank 0's time ``s``, bounds the offset:
``s - b <= offset <= s - a``. The fastest trip gives the tightest bound. Trips before and after the recording give the
drift.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.rpc import trusted
from headway.trace.format import ClockFit

ROUND_TRIPS = 24
TIMEOUT_S = 5.0
UNKNOWN_NS = 1e12  # the uncertainty of a clock that could not be compared
_TIME = struct.Struct("!q")
_FIRST, _LAST = b"f", b"l"


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """One exchange: local time when sent, rank 0's time, local time when received."""

    sent_ns: int
    server_ns: int
    received_ns: int

    @property
    def offset_ns(self) -> float:
        """What to add to the local clock, assuming that both directions took the same time."""
        return self.server_ns - (self.sent_ns + self.received_ns) / 2

    @property
    def uncertainty_ns(self) -> float:
        """The largest possible error of the offset if they did not."""
        return (self.received_ns - self.sent_ns) / 2


def fit_clock(before: Sequence[RoundTrip], after: Sequence[RoundTrip]) -> ClockFit:
    """Fit offset and drift from the fastest round trips before and after; drift is 0 if either is missing."""
    trips = [min(group, key=lambda trip: trip.uncertainty_ns) for group in (before, after) if group]
    if not trips:
        return ClockFit(uncertainty_ns=UNKNOWN_NS)
    first, last = trips[0], trips[-1]
    elapsed_ns = last.sent_ns - first.sent_ns
    drift = (last.offset_ns - first.offset_ns) / elapsed_ns if elapsed_ns > 0 else 0.0
    return ClockFit(
        offset_ns=first.offset_ns,
        drift_ppm=drift * 1e6,
        reference_ns=first.sent_ns,
        uncertainty_ns=max(trip.uncertainty_ns for trip in trips),
    )


class ClockServer:
    """Serves rank 0's time to clients that know ``secret``, during a recording.

    Listens on ``host`` (all addresses if empty) for up to ``ranks`` clients at once. Raises OSError if it cannot.
    """

    def __init__(
        self, host: str, secret: bytes, ranks: int, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._clock = clock
        self._last_rounds = 0
        self._changed = threading.Condition()
        self._server = trusted.TrustedServer(
            host, secret, self._answer, capacity=max(1, ranks), name="headway-clock"
        )

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._server.port

    def wait_for_last_rounds(self, count: int, timeout_s: float) -> bool:
        """Wait until ``count`` ranks have made their closing round trips."""
        with self._changed:
            return self._changed.wait_for(lambda: self._last_rounds >= count, timeout_s)

    def close(self) -> None:
        """Stop answering."""
        self._server.close()

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(TIMEOUT_S)
        last = False
        for _ in range(ROUND_TRIPS):
            kind = connection.recv(1)
            if not kind:
                break
            connection.sendall(_TIME.pack(self._clock()))
            last = last or kind == _LAST
        if last:
            with self._changed:
                self._last_rounds += 1
                self._changed.notify_all()


def measure_round_trips(
    address: tuple[str, int], secret: bytes, *, last: bool, clock: Callable[[], int] = time.monotonic_ns
) -> list[RoundTrip]:
    """Make round trips to rank 0's ClockServer; empty if it cannot be reached or belongs to another job."""
    trips = []
    try:
        with trusted.connect(address, secret, time.monotonic() + TIMEOUT_S) as connection:
            connection.settimeout(TIMEOUT_S)
            for _ in range(ROUND_TRIPS):
                sent_ns = clock()
                connection.sendall(_LAST if last else _FIRST)
                answer = connection.recv(_TIME.size)
                received_ns = clock()
                if len(answer) < _TIME.size:  # the server has ended; eight bytes arrive in one piece
                    break
                trips.append(RoundTrip(sent_ns, _TIME.unpack(answer)[0], received_ns))
    except OSError:
        return trips
    return trips
