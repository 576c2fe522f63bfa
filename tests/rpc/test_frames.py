"""Frames: what was sent arrives, and nothing is allocated for a frame that announces too much."""

from __future__ import annotations

import socket
import struct
import time
import tracemalloc
from collections.abc import Iterator

import pytest

from headway.rpc.frames import FrameError, Limits, TooLargeError, endpoint, receive, send

pytestmark = pytest.mark.timeout(60)
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    sender, receiver = socket.socketpair()
    with sender, receiver:
        yield sender, receiver


def _deadline() -> float:
    return time.monotonic() + 30


@pytest.mark.parametrize("payload", [b"abcdef", [b"ab", b"", memoryview(b"cdef")]])
def test_header_and_payload_arrive(pair: Pair, payload: bytes | list[bytes]) -> None:
    send(pair[0], {"kind": "state"}, payload, _deadline())
    header, received = receive(pair[1], Limits(payload_bytes=6), _deadline())
    assert header == {"kind": "state"}
    assert bytes(received) == b"abcdef"


@pytest.mark.parametrize(
    ("sizes", "part"), [((2**31, 0), "header"), ((2, 2**40), "payload"), ((2, 101), "payload")]
)
def test_a_frame_that_is_too_large_is_refused_before_anything_is_allocated(
    pair: Pair, sizes: tuple[int, int], part: str
) -> None:
    pair[0].sendall(struct.pack("!IQ", *sizes) + b"{}")
    tracemalloc.start()
    try:
        with pytest.raises(TooLargeError, match=f"a {part} of {max(sizes)} bytes; expected at most"):
            receive(pair[1], Limits(payload_bytes=100), _deadline())
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("header", [b"{", b"[]", b"[" * 60_000])
def test_a_header_that_is_not_a_json_object_is_refused(pair: Pair, header: bytes) -> None:
    pair[0].sendall(struct.pack("!IQ", len(header), 0) + header)
    with pytest.raises(FrameError, match="the header of a frame is not"):
        receive(pair[1], Limits(), _deadline())


def test_receiving_ends_at_the_deadline(pair: Pair) -> None:
    pair[0].sendall(struct.pack("!IQ", 2, 0))
    with pytest.raises(TimeoutError):
        receive(pair[1], Limits(), time.monotonic() + 0.1)


def test_addresses_are_split() -> None:
    assert endpoint("10.0.0.1:29650") == ("10.0.0.1", 29650)
    assert endpoint("[::1]:1") == ("::1", 1)
    with pytest.raises(FrameError, match="invalid address"):
        endpoint("10.0.0.1")
