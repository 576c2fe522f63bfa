"""Messages between ranks: what was sent arrives, and nothing is allocated for one that says it is too large."""

from __future__ import annotations

import socket
import struct
import time
import tracemalloc
from collections.abc import Iterator

import pytest
import torch

from headway.strategies.decoupled.peers import Limits, TooLargeError, receive, send

pytestmark = pytest.mark.timeout(60)
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def _deadline() -> float:
    return time.monotonic() + 30


def test_what_is_sent_arrives(pair: Pair) -> None:
    tensors = [torch.arange(5.0), torch.empty(0), torch.ones((), dtype=torch.bfloat16)]
    send(pair[0], ({"want": "state"}, tensors), _deadline())
    message = receive(pair[1], Limits(payload_bytes=22), _deadline())
    assert message.header == {"want": "state"}
    assert torch.frombuffer(bytearray(message.payload[:20]), dtype=torch.float32).tolist() == [0, 1, 2, 3, 4]
    assert len(message.payload) == 22


@pytest.mark.parametrize(
    ("sizes", "what"), [((2**40, 0), "header"), ((2, 2**40), "payload"), ((2, 101), "payload")]
)
def test_a_message_that_says_it_is_too_large_is_refused_before_anything_is_allocated(
    pair: Pair, sizes: tuple[int, int], what: str
) -> None:
    pair[0].sendall(struct.pack("!QQ", *sizes) + b"{}")
    tracemalloc.start()
    try:
        with pytest.raises(TooLargeError, match=f"a {what} of {max(sizes)} bytes; expected at most"):
            receive(pair[1], Limits(payload_bytes=100), _deadline())
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_message_that_does_not_come_is_not_waited_for_for_ever(pair: Pair) -> None:
    pair[0].sendall(struct.pack("!QQ", 2, 0))
    with pytest.raises(TimeoutError):
        receive(pair[1], Limits(), time.monotonic() + 0.1)
