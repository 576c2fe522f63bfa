"""Clocks: bringing every rank's monotonic clock onto rank 0's by round trips.

A round trip that left at ``a``, was answered with rank 0's time ``s`` and came back at ``b`` (both on the own
clock) bounds the offset: ``s - b <= offset <= s - a``. The fastest trip bounds it best. Trips before and after
the recording give the drift.
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
UNKNOWN_NS = 1e12  # the uncertainty of a clock that could not be compared: nothing finer may be concluded
_TIME = struct.Struct("!q")
_FIRST, _LAST = b"f", b"l"


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """One exchange: own time when it left, rank 0's time, own time when it came back."""

    sent_ns: int
    server_ns: int
    received_ns: int

    @property
    def offset_ns(self) -> float:
        """What to add to the own clock, if both ways took the same time."""
        return self.server_ns - (self.sent_ns + self.received_ns) / 2

    @property
    def uncertainty_ns(self) -> float:
        """By how much the offset may be wrong if they did not."""
        return (self.received_ns - self.sent_ns) / 2


def fit_clock(before: Sequence[RoundTrip], after: Sequence[RoundTrip]) -> ClockFit:
    """Fit offset and drift from the fastest round trip before and after; drift is 0 where one is missing."""
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
    """Answers those who know ``secret`` with rank 0's time, while a recording goes on.

    It listens on ``host``, on all addresses where that is empty, for up to ``ranks`` others at once. Raises OSError
    where it cannot.
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
    """Make round trips to rank 0's ClockServer; an empty list where it cannot be reached, or is none of this job."""
    trips = []
    try:
        with trusted.connect(address, secret, time.monotonic() + TIMEOUT_S) as connection:
            connection.settimeout(TIMEOUT_S)
            for _ in range(ROUND_TRIPS):
                sent_ns = clock()
                connection.sendall(_LAST if last else _FIRST)
                answer = connection.recv(_TIME.size)
                received_ns = clock()
                if len(answer) < _TIME.size:  # it has ended; eight bytes come in one piece
                    break
                trips.append(RoundTrip(sent_ns, _TIME.unpack(answer)[0], received_ns))
    except OSError:
        return trips
    return trips
