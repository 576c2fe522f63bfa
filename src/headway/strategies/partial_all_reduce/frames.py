"""Frames: requests and answers between workers, a JSON header and raw bytes, both bounded. Nothing is unpickled."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from headway.rpc.trusted import TrustedServer, receive_exactly, remaining_s
from headway.strategies.partial_all_reduce.coordinator.transport import format_address

Header = Mapping[str, Any]

MAX_HEADER_BYTES = 64 * 2**20  # that of a state names every tensor of a model
PIECE_BYTES = 4 * 2**20
_SIZES = struct.Struct("!IQ")


class FrameError(ConnectionError):
    """The other end sent what is none of ours."""


def send(connection: socket.socket, header: Header, payload: bytes | memoryview, deadline: float) -> None:
    """Send one frame before ``deadline``, a time of ``time.monotonic()``. Raises OSError, TimeoutError."""
    encoded = json.dumps(header).encode()
    send_raw(connection, _SIZES.pack(len(encoded), len(payload)) + encoded, deadline)
    send_raw(connection, payload, deadline)


def send_raw(connection: socket.socket, payload: bytes | memoryview, deadline: float) -> None:
    """Send bytes that the receiver knows the number of."""
    view = memoryview(payload)
    for start in range(0, len(view), PIECE_BYTES):
        connection.settimeout(remaining_s(deadline))
        connection.sendall(view[start : start + PIECE_BYTES])


def receive(
    connection: socket.socket, deadline: float, *, max_payload_bytes: int, max_header_bytes: int = 2**16
) -> tuple[dict[str, Any], bytearray]:
    """The next frame. Raises FrameError for one that is larger or no JSON object, TimeoutError, OSError."""
    header_bytes, payload_bytes = _SIZES.unpack(receive_exactly(connection, _SIZES.size, deadline))
    if header_bytes > max_header_bytes or payload_bytes > max_payload_bytes:
        raise FrameError(f"a frame of {header_bytes} and {payload_bytes} bytes is larger than expected")
    try:
        header = json.loads(receive_exactly(connection, header_bytes, deadline))
    except (ValueError, RecursionError) as error:
        raise FrameError("a frame's header is no JSON") from error
    if not isinstance(header, dict):
        raise FrameError("a frame's header is no object")
    return header, receive_exactly(connection, payload_bytes, deadline)


class FrameServer:
    """Has ``answer`` called with every connection to ``address``, on a thread of its own, until that ends.

    Raises OSError where it cannot listen on ``host``.
    """

    def __init__(
        self, host: str, secret: bytes, answer: Callable[[socket.socket], None], *, capacity: int, name: str
    ) -> None:
        self._answer = answer
        self._connections: set[socket.socket] = set()
        self._server = TrustedServer(host, secret, self._kept, capacity=capacity, name=name)
        self.address = format_address(host, self._server.port)

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.close()
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _kept(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connections.add(connection)
        try:
            self._answer(connection)
        finally:
            self._connections.discard(connection)
