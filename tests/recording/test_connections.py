"""What is counted of connections, on real sockets of this process: both of their ends are here."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from headway.recording import connections
from headway.recording.connections import (
    LEAST_BYTES,
    OFTEN,
    SELDOM,
    ConnectionWatch,
    Endpoint,
    Use,
    peers_of,
)  # fmt: skip

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of its connections"),
]

MUCH = 3 * LEAST_BYTES


class Sockets:
    """Sockets of a test, all closed after it."""

    def __init__(self) -> None:
        self.stack = ExitStack()

    def pair(self, host: str = "127.0.0.1", server_host: str = "") -> tuple[socket.socket, socket.socket]:
        """A connection's two ends."""
        family = socket.AF_INET6 if ":" in (server_host or host) else socket.AF_INET
        dual = server_host == "::"
        with socket.create_server((server_host or host, 0), family=family, dualstack_ipv6=dual) as server:
            client = self.kept(socket.create_connection((host, server.getsockname()[1])))
            return client, self.kept(server.accept()[0])

    def kept(self, one: socket.socket) -> socket.socket:
        return self.stack.enter_context(one)


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    made = Sockets()
    with made.stack:
        yield made


@pytest.fixture
def watch() -> Iterator[ConnectionWatch]:
    made = ConnectionWatch()
    yield made
    made.forget()


def send(source: socket.socket, target: socket.socket, size_bytes: int) -> None:
    """Send that much, and return when the kernel of the sender knows that it has arrived."""
    sender = threading.Thread(target=source.sendall, args=(bytes(size_bytes),))
    sender.start()
    left = size_bytes
    while left:
        left -= len(target.recv(min(left, 1 << 20)))
    sender.join()
    deadline = time.monotonic() + 20
    while struct.unpack("i", fcntl.ioctl(source, termios.TIOCOUTQ, bytes(4)))[0]:
        assert time.monotonic() < deadline, "what was sent is not acknowledged"
        time.sleep(0.001)


def ends(one: socket.socket) -> tuple[Endpoint, Endpoint]:
    """Its own address and its peer's."""
    local, remote = one.getsockname(), one.getpeername()
    return (local[0], local[1]), (remote[0], remote[1])


def of(watch: ConnectionWatch, one: socket.socket | tuple[Endpoint, Endpoint]) -> list[Use]:
    """What was noted of one end of a connection."""
    own = ends(one) if isinstance(one, socket.socket) else one
    return [use for use in watch.uses if (use.local, use.remote) == own]


def seen(watch: ConnectionWatch) -> set[tuple[Endpoint, Endpoint]]:
    return {((a[0], a[1]), (b[0], b[1])) for a, b in json.loads(watch.pairs())}


def test_bytes_are_counted_in_each_direction_and_step(sockets: Sockets, watch: ConnectionWatch) -> None:
    here, there = sockets.pair()
    send(here, there, 1_000_000)  # before
    watch.recording_begins(now_ns=1_000)
    send(here, there, MUCH)
    watch.step_ends(5, now_ns=2_000, recorded=True)
    watch.step_ends(6, now_ns=3_000, recorded=True)
    send(there, here, 70_000)
    send(here, there, 80_000)
    watch.step_ends(7, now_ns=4_000, recorded=True)
    counted = [(use.step, use.start_ns, use.end_ns, use.size_bytes) for use in of(watch, here)]
    assert counted == [(5, 1_000, 2_000, MUCH), (7, 3_000, 4_000, 80_000)]
    assert [(use.step, use.size_bytes) for use in of(watch, there)] == [(7, 70_000)]
    assert all(use.busy_ns > 0 for use in watch.uses)
    assert all(use.delivered_bytes_a_s > 0 for use in of(watch, here))


def test_a_connection_is_busy_while_something_is_in_flight(sockets: Sockets, watch: ConnectionWatch) -> None:
    here, there = sockets.pair()
    watch.recording_begins(1)
    began_ns = time.monotonic_ns()
    send(here, there, 30_000_000)
    took_ns = time.monotonic_ns() - began_ns
    watch.step_ends(0, 2, recorded=True)
    (use,) = of(watch, here)
    assert use.size_bytes == 30_000_000
    assert 0 < use.busy_ns <= took_ns + 20_000_000  # the kernel counts in its own ticks


@pytest.mark.parametrize(
    ("host", "server_host"),
    [("127.0.0.1", ""), ("::1", ""), ("127.0.0.1", "::")],
    ids=["IPv4", "IPv6", "both"],
)
def test_a_peer_is_known_by_both_ends(
    host: str, server_host: str, sockets: Sockets, watch: ConnectionWatch
) -> None:
    try:
        here, there = sockets.pair(host, server_host)
    except OSError as missing:
        pytest.skip(f"no IPv6 here: {missing}")
    watch.recording_begins(1)
    send(here, there, MUCH)
    send(there, here, MUCH)
    watch.step_ends(0, 2, recorded=True)
    (own, other) = ends(here)
    peers = peers_of(watch.uses, {3: json.dumps([[own, other]]), 7: json.dumps([[other, own]])})
    assert peers == {(own, other): 7, (other, own): 3}
    assert {use.local for use in watch.uses} == {own, other}
    assert peers_of(watch.uses, {9: watch.pairs()}) == {(own, other): 9, (other, own): 9}
    assert peers_of(watch.uses, {3: json.dumps([[own, other]])}) == {(other, own): 3}


def test_a_connection_that_carries_little_is_no_link(sockets: Sockets, watch: ConnectionWatch) -> None:
    here, there = sockets.pair()
    watch.recording_begins(1)
    send(here, there, LEAST_BYTES // 2)
    watch.step_ends(0, 2, recorded=True)
    assert peers_of(watch.uses, {1: watch.pairs()}) == {}
    send(here, there, LEAST_BYTES - LEAST_BYTES // 2)
    watch.step_ends(1, 3, recorded=True)
    assert peers_of(watch.uses, {1: watch.pairs()}) == {ends(here): 1}


def test_other_sockets_are_left_alone(sockets: Sockets, watch: ConnectionWatch, tmp_path: Path) -> None:
    before = ConnectionWatch()
    before.recording_begins(1)
    udp, other_udp = (sockets.kept(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(2))
    other_udp.bind(("127.0.0.1", 0))
    udp.connect(other_udp.getsockname())
    for one in socket.socketpair():
        sockets.kept(one)
    unix = sockets.kept(socket.socket(socket.AF_UNIX))
    unix.bind(str(tmp_path / "socket"))
    sockets.kept(socket.socket())  # unconnected
    sockets.kept(socket.create_server(("127.0.0.1", 0)))
    pipe = os.pipe()
    watch.recording_begins(1)
    udp.send(bytes(1000))
    watch.step_ends(0, 2, recorded=True)
    assert seen(watch) == seen(before)
    assert other_udp.recv(2000) == bytes(1000)
    for descriptor in pipe:
        os.close(descriptor)
    before.forget()


def test_sockets_stay_as_they_are_where_the_process_has_a_default_timeout(
    sockets: Sockets, watch: ConnectionWatch
) -> None:
    here, there = sockets.pair()
    there.setblocking(False)
    here.setblocking(True)
    usual = socket.getdefaulttimeout()
    socket.setdefaulttimeout(5.0)
    try:
        watch.recording_begins(1)
        watch.step_ends(0, 2, recorded=True)
    finally:
        socket.setdefaulttimeout(usual)
    assert (os.get_blocking(here.fileno()), os.get_blocking(there.fileno())) == (True, False)


def test_what_is_closed_is_closed_at_once(sockets: Sockets, watch: ConnectionWatch) -> None:
    here, there = sockets.pair()
    own = ends(here)
    watch.recording_begins(1)
    send(here, there, MUCH)
    watch.step_ends(0, 2, recorded=True)
    here.close()
    there.settimeout(20)
    assert there.recv(1) == b"", "the peer is not told"
    watch.step_ends(1, 3, recorded=True)
    there.close()
    watch.step_ends(2, 4, recorded=True)
    assert [use.step for use in of(watch, own)] == [0]
    assert own in seen(watch), "others still have to recognise what it carried"


def test_a_descriptor_that_another_socket_took_is_another_connection(
    sockets: Sockets, watch: ConnectionWatch
) -> None:
    here, there = sockets.pair()
    own, descriptor = ends(here), here.fileno()
    send(here, there, 500_000)
    watch.recording_begins(1)
    here.close()
    next_here, next_there = sockets.pair()
    if next_here.fileno() != descriptor:
        os.dup2(next_here.fileno(), descriptor)
        next_here.close()
        next_here = sockets.kept(socket.socket(fileno=descriptor))
    send(next_here, next_there, MUCH)
    for step in range(3):
        watch.step_ends(step, step + 2, recorded=True)
    assert of(watch, own) == []
    (use,) = of(watch, next_here)
    assert use.size_bytes in (
        MUCH,
        MUCH + 1,
    )  # the kernel may count the first packet, which opens the connection


def test_a_connection_opened_later_is_counted_whole(sockets: Sockets, watch: ConnectionWatch) -> None:
    watch.recording_begins(1)
    here, there = sockets.pair()
    send(here, there, MUCH)
    watch.step_ends(0, 2, recorded=True)
    watch.step_ends(1, 3, recorded=True)
    (use,) = of(watch, here)
    assert (use.step, use.size_bytes - MUCH) in ((0, 0), (0, 1))


def test_a_descriptor_given_twice_is_one_connection(sockets: Sockets, watch: ConnectionWatch) -> None:
    here, there = sockets.pair()
    sockets.kept(here.dup())
    watch.recording_begins(1)
    send(here, there, MUCH)
    watch.step_ends(0, 2, recorded=True)
    assert len(of(watch, here)) == 1


def test_no_descriptor_is_kept(sockets: Sockets) -> None:
    def opened() -> dict[str, str]:
        found = {}
        for name in os.listdir("/proc/self/fd"):
            try:
                found[name] = os.readlink(f"/proc/self/fd/{name}")
            except OSError:  # of the listing itself
                continue
        return found

    here, there = sockets.pair()
    sockets.kept(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    before = opened()
    watch = ConnectionWatch()
    watch.recording_begins(1)
    assert opened() == before
    send(here, there, MUCH)
    watch.step_ends(0, 2, recorded=True)
    assert opened() == before
    watch.forget()
    assert opened() == before
    assert json.loads(watch.pairs()) == []
    send(here, there, 10)  # it still works
    watch.step_ends(1, 3, recorded=True)
    assert len(of(watch, here)) == 1


@pytest.mark.parametrize("missing", ["another platform", "no TCP_INFO", "less of it", "no /proc"])
def test_where_the_kernel_does_not_tell_there_is_nothing(
    missing: str, sockets: Sockets, watch: ConnectionWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = sockets.pair()
    if missing == "another platform":
        monkeypatch.setattr(sys, "platform", "darwin")
    elif missing == "no /proc":
        monkeypatch.setattr(connections, "_DESCRIPTORS", Path("/proc/self/no such folder"))
    else:
        real, most = connections._option, 0 if missing == "no TCP_INFO" else 104

        def told(descriptor: int, level: int, name: int, size_bytes: int) -> bytes:
            found = real(descriptor, level, name, size_bytes)
            return found[:most] if level == socket.IPPROTO_TCP else found

        monkeypatch.setattr(connections, "_option", told)
    watch.recording_begins(1)
    send(here, there, MUCH)
    watch.step_ends(0, 2, recorded=True)
    assert watch.uses == []
    assert json.loads(watch.pairs()) == []


def test_there_is_a_bound_on_how_many_are_watched(
    sockets: Sockets, watch: ConnectionWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        sockets.pair()
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)
    watch.recording_begins(1)
    sockets.pair()
    watch.step_ends(0, 2, recorded=True)
    assert len(seen(watch)) == 3


def test_nothing_is_noted_before_the_beginning(sockets: Sockets, watch: ConnectionWatch) -> None:
    here, there = sockets.pair()
    send(here, there, MUCH)
    watch.step_ends(0, 2, recorded=True)
    assert watch.uses == []


def test_new_connections_are_found_often_at_first_and_seldom_later(
    sockets: Sockets, watch: ConnectionWatch
) -> None:
    watch.recording_begins(now_ns=1)
    for step in range(OFTEN):
        watch.step_ends(step, step + 2, recorded=True)
    here, there = sockets.pair()
    send(here, there, MUCH)
    watch.step_ends(OFTEN, 100, recorded=True)
    assert of(watch, here) == []
    for step in range(OFTEN + 1, SELDOM + 1):
        watch.step_ends(step, 100 + step, recorded=True)
    (use,) = of(watch, here)
    assert use.step == SELDOM
    assert use.size_bytes in (MUCH, MUCH + 1)  # the kernel counts its greeting, or does not
