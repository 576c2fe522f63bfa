"""Another tenant's traffic: one real TCP connection at a given rate, in a process of its own at each end."""

from __future__ import annotations

import contextlib
import socket
import time

_CHUNK_S = 0.01
_MOST_CHUNK_BYTES = 64 * 2**10


def chunk_bytes(rate_gbps: float) -> int:
    """How much is sent at once: 10 ms worth, within bounds."""
    return min(max(1, round(rate_gbps * 1e9 / 8 * _CHUNK_S)), _MOST_CHUNK_BYTES)


def drain(listener: socket.socket) -> None:
    """Accept one connection and read it to its end."""
    connection, _ = listener.accept()
    buffer = bytearray(2**18)
    with connection, contextlib.suppress(OSError):
        while connection.recv_into(buffer):
            pass


def send(target: tuple[str, int], rate_gbps: float, duration_s: float | None) -> None:
    """Send at ``rate_gbps``, or as much less as the network carries, for ``duration_s`` or until killed.

    What could not be sent in time is not made up for later: the tenant's rate is a ceiling.
    """
    chunk = bytes(chunk_bytes(rate_gbps))
    interval_s = len(chunk) * 8 / (rate_gbps * 1e9)
    ends = None if duration_s is None else time.monotonic() + duration_s
    with socket.create_connection(target, timeout=30.0) as connection, contextlib.suppress(OSError):
        connection.settimeout(None)
        due = time.monotonic()
        while ends is None or due < ends:
            connection.sendall(chunk)
            due = max(due + interval_s, time.monotonic() - 0.1)
            time.sleep(max(0.0, due - time.monotonic()))
