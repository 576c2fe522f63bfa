"""Clocks: bringing every rank's monotonic clock onto rank 0's by round trips.

A round trip that left at ``a``, was answered with rank 0's time ``s`` and came back at ``b`` (both on the own
clock) bounds the offset: ``s - b <= offset <= s - a``. The quickest trip bounds it best. Trips before and after
the recording give the drift.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    """Fit offset and drift from the quickest round trip before and after; drift is 0 where one is missing."""
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
    """Answers with rank 0's time; runs in a daemon thread of rank 0 while a recording goes on."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._socket = socket.create_server(("0.0.0.0", 0), backlog=1024)
        self._last_rounds = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._serve, name="headway-clock", daemon=True).start()

    @property
    def port(self) -> int:
        """The port it listens on, on all addresses."""
        port: int = self._socket.getsockname()[1]
        return port

    def wait_for_last_rounds(self, count: int, timeout_s: float) -> bool:
        """Wait until ``count`` ranks have made their closing round trips."""
        with self._changed:
            return self._changed.wait_for(lambda: self._last_rounds >= count, timeout_s)

    def close(self) -> None:
        """Stop answering."""
        with contextlib.suppress(OSError):  # wakes the thread that accepts, which would keep the port open
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                last = False
                while kind := connection.recv(1):
                    connection.sendall(_TIME.pack(self._clock()))
                    last = last or kind == _LAST
            except OSError:
                return
            if last:
                with self._changed:
                    self._last_rounds += 1
                    self._changed.notify_all()


def measure_round_trips(
    address: tuple[str, int], *, last: bool, clock: Callable[[], int] = time.monotonic_ns
) -> list[RoundTrip]:
    """Make round trips to rank 0's ClockServer; an empty list where it cannot be reached."""
    trips = []
    try:
        with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(ROUND_TRIPS):
                sent_ns = clock()
                connection.sendall(_LAST if last else _FIRST)
                answer = _receive_exactly(connection, _TIME.size)
                trips.append(RoundTrip(sent_ns, _TIME.unpack(answer)[0], clock()))
    except OSError:
        return trips
    return trips


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise ConnectionError("the clock server closed the connection")
        received += part
    return received


def own_address_towards(host: str, port: int) -> str:
    """The address of this machine that ``host`` can reach: the one a packet to it would carry."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address
