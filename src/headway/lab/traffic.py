"""Emulates another tenant's traffic: TCP connections that together send at a given rate.

It uses several connections because a link's queue is shared by connection: a single one would get next to nothing
against a bulk transfer, unlike a busy neighbour.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time

CONNECTIONS = 4
_CHUNK_S = 0.01
_MOST_CHUNK_BYTES = 64 * 2**10


def chunk_bytes(rate_gbps: float) -> int:
    """How much is sent at once: 10 ms worth, within bounds."""
    return min(max(1, round(rate_gbps * 1e9 / 8 * _CHUNK_S)), _MOST_CHUNK_BYTES)


def drain(listener: socket.socket) -> None:
    """Accept connections and read them, until all that came have ended."""
    buffer = bytearray(2**18)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        accepted = 0
        while accepted < CONNECTIONS or len(selector.get_map()) > 1:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    selector.register(connection, selectors.EVENT_READ, connection)
                    accepted += 1
                elif not _read(key.data, buffer):
                    selector.unregister(key.data)
                    key.data.close()


def _read(connection: socket.socket, buffer: bytearray) -> int:
    try:
        return connection.recv_into(buffer)
    except OSError:
        return 0


def send(target: tuple[str, int], rate_gbps: float, duration_s: float | None) -> None:
    """Send at ``rate_gbps`` over all connections, or as much less as the network carries.

    Lasts ``duration_s``, or until killed. Lost time is not made up for: the rate is a
    ceiling.
    """
    ends = None if duration_s is None else time.monotonic() + duration_s
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(target, timeout=30.0)) for _ in range(CONNECTIONS)
        ]
        for connection in connections:
            connection.settimeout(None)
            if os.fork() == 0:
                try:
                    _send_one(connection, rate_gbps / CONNECTIONS, ends)
                finally:
                    os._exit(0)
        for _ in connections:
            os.wait()


def _send_one(connection: socket.socket, rate_gbps: float, ends: float | None) -> None:
    chunk = bytes(chunk_bytes(rate_gbps))
    interval_s = len(chunk) * 8 / (rate_gbps * 1e9)
    due = time.monotonic()
    with contextlib.suppress(OSError):
        while ends is None or due < ends:
            connection.sendall(chunk)
            due = max(due + interval_s, time.monotonic() - 0.1)
            time.sleep(max(0.0, due - time.monotonic()))
