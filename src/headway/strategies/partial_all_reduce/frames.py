"""Frames: requests and answers between workers, a JSON header and raw bytes, both bounded. Nothing is unpickled."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

from headway.rpc.trusted import receive_exactly, remaining_s

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
