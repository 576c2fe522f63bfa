"""Frames: messages between ranks as a JSON header and raw bytes. Both are bounded, and nothing is unpickled.

    header size (4 bytes)   payload size (8 bytes)   header (JSON object)   payload

Sizes are unsigned and big-endian. A receiver says how large each part may be and allocates nothing for larger ones.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from headway.rpc.interface import format_address
from headway.rpc.trusted import TrustedServer, receive_exactly, remaining_s

Header = Mapping[str, Any]
Buffer = bytes | bytearray | memoryview

HEADER_BYTES = 64 * 2**10
LARGE_HEADER_BYTES = 64 * 2**20
"""Bound of headers that name every tensor of a model, or carry the options of all parameter groups."""
PIECE_BYTES = 4 * 2**20  # sent at a time: the deadline is checked between pieces
_SIZES = struct.Struct("!IQ")


class FrameError(ConnectionError):
    """The other end sent something that is not a valid frame or request."""


class TooLargeError(FrameError):
    """A frame announces a header or payload larger than the receiver accepts."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a received frame may be."""

    header_bytes: int = HEADER_BYTES
    payload_bytes: int = 0


class Frame(NamedTuple):
    """A received message."""

    header: dict[str, Any]
    payload: memoryview


def send(
    connection: socket.socket, header: Header, payload: Buffer | Iterable[Buffer], deadline: float
) -> None:
    """Send one frame whose payload is a buffer, or several buffers one after another.

    ``deadline`` is a time of ``time.monotonic()``. Raises TimeoutError past it, and OSError if the connection fails.
    """
    buffers = [payload] if isinstance(payload, Buffer) else list(payload)
    views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
    encoded = json.dumps(dict(header)).encode()
    sizes = _SIZES.pack(len(encoded), sum(view.nbytes for view in views))
    send_raw(connection, sizes + encoded, deadline)
    for view in views:
        send_raw(connection, view, deadline)


def send_raw(connection: socket.socket, payload: Buffer, deadline: float) -> None:
    """Send bytes without a frame, to a receiver that knows how many to expect. Raises as ``send`` does."""
    view = memoryview(payload)
    for start in range(0, len(view), PIECE_BYTES):
        connection.settimeout(remaining_s(deadline))
        connection.sendall(view[start : start + PIECE_BYTES])


def receive(connection: socket.socket, limits: Limits, deadline: float) -> Frame:
    """Receive the next frame.

    Raises TooLargeError if it exceeds ``limits``, FrameError if its header is not a JSON object, TimeoutError past
    ``deadline``, and OSError if the connection fails.
    """
    header_bytes, payload_bytes = _SIZES.unpack(receive_exactly(connection, _SIZES.size, deadline))
    for part, size_bytes, limit_bytes in (
        ("header", header_bytes, limits.header_bytes),
        ("payload", payload_bytes, limits.payload_bytes),
    ):
        if size_bytes > limit_bytes:
            raise TooLargeError(f"a {part} of {size_bytes} bytes; expected at most {limit_bytes}")
    try:
        header = json.loads(receive_exactly(connection, header_bytes, deadline))
    except (ValueError, RecursionError) as error:
        raise FrameError("the header of a frame is not valid JSON") from error
    if not isinstance(header, dict):
        raise FrameError("the header of a frame is not a JSON object")
    return Frame(header, memoryview(receive_exactly(connection, payload_bytes, deadline)))


def endpoint(address: str) -> tuple[str, int]:
    """Split ``HOST:PORT``. Raises FrameError if ``address``, which another rank sent, is malformed."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise FrameError(f"invalid address {address[:100]!r}; expected HOST:PORT")
    return host.strip("[]"), int(port)


class FrameServer:
    """Calls ``answer`` with each authenticated connection to ``address``, on a thread of its own.

    Raises OSError if it cannot listen on ``host``.
    """

    def __init__(
        self, host: str, secret: bytes, answer: Callable[[socket.socket], None], *, capacity: int, name: str
    ) -> None:
        self._answer = answer
        self._connections: set[socket.socket] = set()
        self._server = TrustedServer(host, secret, self._serve, capacity=capacity, name=name)
        self.address = format_address(host, self._server.port)

    def close(self) -> None:
        """Stop listening and end all connections."""
        self._server.close()
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connections.add(connection)
        try:
            self._answer(connection)
        finally:
            self._connections.discard(connection)
