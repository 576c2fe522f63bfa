"""Messages between ranks: JSON headers and raw bytes of tensors, bounded on either side; nothing is ever unpickled."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headway.rpc.trusted import receive_exactly, remaining_s

_SIZES = struct.Struct("!QQ")  # of the header and of the payload, in bytes
HEADER_BYTES = 64 * 2**10

Reply = tuple[Mapping[str, Any], Sequence[torch.Tensor]]
"""A header, and flat CPU tensors."""


class TooLargeError(ConnectionError):
    """A message says that it is larger than it can be."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a message may be."""

    header_bytes: int = HEADER_BYTES
    payload_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """A message: its header, and its tensors one after the other as bytes."""

    header: dict[str, Any]
    payload: memoryview


def send(connection: socket.socket, message: Reply, deadline: float) -> None:
    """Send ``message``. Raises TimeoutError where it is not taken before ``deadline``, OSError where it cannot be."""
    header, tensors = message
    text = json.dumps(dict(header)).encode()
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    connection.settimeout(remaining_s(deadline))
    connection.sendall(_SIZES.pack(len(text), size_bytes) + text)
    for tensor in tensors:
        if tensor.numel():
            connection.settimeout(remaining_s(deadline))
            connection.sendall(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def receive(connection: socket.socket, limits: Limits, deadline: float) -> Answer:
    """The next message. Raises TooLargeError before anything is allocated for it, TimeoutError, ConnectionError."""
    header_bytes, payload_bytes = _SIZES.unpack(receive_exactly(connection, _SIZES.size, deadline))
    for what, size_bytes, limit_bytes in (
        ("header", header_bytes, limits.header_bytes),
        ("payload", payload_bytes, limits.payload_bytes),
    ):
        if size_bytes > limit_bytes:
            raise TooLargeError(f"a {what} of {size_bytes} bytes; expected at most {limit_bytes}")
    header = json.loads(receive_exactly(connection, header_bytes, deadline))
    return Answer(header, memoryview(receive_exactly(connection, payload_bytes, deadline)))
