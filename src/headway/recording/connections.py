"""Reads the kernel's counters of this process's TCP connections, and exchanges clocks and connections between ranks.

Native collectives do not report what they send to whom. The kernel counts the bytes and busy time of every connection,
whoever opened it, and reading them takes microseconds (``struct tcp_info`` in ``linux/tcp.h``). Ranks publish their
connections in the job's store, so that each can tell which rank a connection leads to.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import socket
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from headway import torch_private
from headway.clocks import comparing
from headway.errors import UserError
from headway.recording.watch import Watch
from headway.rpc import interface, trusted
from headway.trace.events import Event, Kind, Stream
from headway.trace.format import ClockFit

_INFO_BYTES = 232
_ACKED, _RATES = struct.Struct("=Q").unpack_from, struct.Struct("=QQQ").unpack_from
_ACKED_AT = 120  # tcpi_bytes_acked
_RATES_AT = 160  # tcpi_delivery_rate in bytes a second; tcpi_busy_time and tcpi_rwnd_limited in microseconds
_LEAST_INFO_BYTES = 184
_DESCRIPTORS = Path("/proc/self/fd")
MAX_CONNECTIONS = 4096
LEAST_BYTES = 65_536  # a connection that carries less in a whole recording is no link of the job

OFTEN, SELDOM = 4, 8  # look for new connections after each of the first 4 steps, then after every 8th

Endpoint = tuple[str, int]


@dataclass(slots=True)
class _Connection:
    """One connection: its descriptor and endpoints, and its counters when they were last read."""

    descriptor: int
    inode: int  # the socket's: once it is closed, another one may get its descriptor
    local: Endpoint
    remote: Endpoint
    is_open: bool = True
    acked_bytes: int = 0
    busy_us: int = 0


@dataclass(slots=True)
class Use:
    """What a connection sent in one step, and how long it was limited by nothing but the network (``busy_ns``).

    The kernel counts busy time in ticks of 1 to 10 ms, so it is accurate only over many steps.
    ``delivered_bytes_a_s`` is the kernel's latest estimate of the delivery rate. It stays high when only the
    receiver's acknowledgements are late: such a connection is busy but not slow.
    """

    local: Endpoint
    remote: Endpoint
    step: int
    start_ns: int
    end_ns: int
    size_bytes: int
    busy_ns: int
    delivered_bytes_a_s: int


@dataclass
class ConnectionWatch(Watch):
    """Samples every TCP connection of this process at the end of each step. Does nothing outside Linux.

    It keeps no connection open: when the process closes one, it is closed, and the peer sees that. What it carried
    since the last sample is not counted.
    """

    uses: list[Use] = field(default_factory=list)
    peers: Mapping[tuple[Endpoint, Endpoint], int] = field(default_factory=dict)  # ranks, by connections
    _connections: list[_Connection] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)  # descriptors that were looked at
    _since_ns: int = 0
    _ends: int = 0  # of steps, since the beginning

    def recording_begins(self, now_ns: int) -> None:
        """Count from now on."""
        self._find()
        for connection in self._connections:
            self._look(connection)
        self._since_ns, self._ends = now_ns, 0

    def step_ends(self, step: int, now_ns: int, *, recorded: bool) -> None:
        """Note what was sent since the last sample.

        New connections are looked for at the end of each of the first steps, and of every eighth step after them.
        """
        if not recorded or not self._since_ns:
            return
        if self._ends < OFTEN or self._ends % SELDOM == 0:
            self._find()
        self._ends += 1
        for connection in self._connections:
            acked_bytes, busy_us = connection.acked_bytes, connection.busy_us
            delivered = self._look(connection)
            if connection.acked_bytes > acked_bytes:
                self.uses.append(
                    Use(
                        connection.local, connection.remote, step, self._since_ns, now_ns,
                        connection.acked_bytes - acked_bytes, max(connection.busy_us - busy_us, 1) * 1000, delivered,
                    )
                )  # fmt: skip
        self._since_ns = now_ns

    def add_rows(self, rows: list[Event]) -> list[Event]:
        """Add what connections to ``peers`` carried."""
        return rows + link_rows(self.uses, self.peers)

    def forget(self) -> None:
        """Drop the connections."""
        self._connections.clear()
        self._seen.clear()
        self._since_ns = 0

    def pairs(self) -> str:
        """Both endpoints of every connection as JSON, for other ranks to match with their own."""
        return json.dumps([[connection.local, connection.remote] for connection in self._connections])

    def _find(self) -> None:
        """Add connections whose descriptors are new."""
        if sys.platform != "linux":
            return
        try:
            names = set(os.listdir(_DESCRIPTORS))
        except OSError:
            return
        self._seen &= names
        open_inodes = {connection.inode for connection in self._connections if connection.is_open}
        for name in names - self._seen:
            try:
                status = os.fstat(int(name))
            except OSError:  # closed meanwhile, such as the descriptor of the listing itself
                continue
            self._seen.add(name)
            if stat.S_ISSOCK(status.st_mode) and status.st_ino not in open_inodes and self._has_room:
                connection = _opened(int(name), status.st_ino)
                if connection is not None:
                    self._connections.append(connection)
                    open_inodes.add(status.st_ino)

    @property
    def _has_room(self) -> bool:
        return len(self._connections) < MAX_CONNECTIONS

    def _look(self, connection: _Connection) -> int:
        """Update a connection's counters; returns its delivery rate, 0 if it is closed."""
        if not connection.is_open:
            return 0
        try:
            counters = (
                _tcp_counters(connection.descriptor)
                if os.fstat(connection.descriptor).st_ino == connection.inode
                else None
            )
        except OSError:
            counters = None
        if counters is None:
            connection.is_open = False
            self._seen.discard(str(connection.descriptor))
            return 0
        connection.acked_bytes, connection.busy_us, delivered = counters
        return delivered


def peers_of(uses: Iterable[Use], published: dict[int, str]) -> dict[tuple[Endpoint, Endpoint], int]:
    """The rank at the other end of each connection that carried data, from the endpoints that ranks published."""
    carried: dict[tuple[Endpoint, Endpoint], int] = {}
    for use in uses:
        carried[use.local, use.remote] = carried.get((use.local, use.remote), 0) + use.size_bytes
    owner: dict[tuple[Endpoint, Endpoint], int] = {}
    for rank, text in published.items():
        for local, remote in json.loads(text):
            owner[_endpoint(local), _endpoint(remote)] = rank
    return {
        (local, remote): owner[remote, local]
        for (local, remote), size_bytes in carried.items()
        if size_bytes >= LEAST_BYTES and (remote, local) in owner
    }


def link_rows(uses: Iterable[Use], peers: Mapping[tuple[Endpoint, Endpoint], int]) -> list[Event]:
    """Events of what each connection to another rank carried in each step, and its delivery rate."""
    rows = []
    for use in uses:
        peer = peers.get((use.local, use.remote))
        if peer is None:
            continue
        busy_ns = min(use.busy_ns, use.end_ns - use.start_ns)
        carried = Event(
            Kind.LINK,
            "",
            Stream.COMMUNICATION,
            use.step,
            use.start_ns,
            busy_ns,
            size_bytes=use.size_bytes,
            peer=peer,
        )
        rows.append(carried)
        if use.delivered_bytes_a_s:
            rate = min(use.delivered_bytes_a_s, 2**62)
            rows.append(
                carried._replace(kind=Kind.DELIVERY_RATE, start_ns=use.end_ns, duration_ns=0, size_bytes=rate)
            )
    return rows


def _opened(descriptor: int, inode: int) -> _Connection | None:
    """The TCP connection of ``descriptor``; None for any other socket."""
    family = int.from_bytes(_option(descriptor, socket.SOL_SOCKET, socket.SO_DOMAIN, 4), sys.byteorder)
    if family not in (socket.AF_INET, socket.AF_INET6) or _tcp_counters(descriptor) is None:
        return None
    try:
        copied = os.dup(descriptor)  # a socket object closes its descriptor
    except OSError:
        return None
    try:
        # Non-blocking, or socket() would set the process's default timeout on the job's own connection.
        kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
        copy = socket.socket(family, kind, socket.IPPROTO_TCP, copied)
    except OSError:
        os.close(copied)
        return None
    with copy:
        try:
            return _Connection(
                descriptor, inode, _endpoint(copy.getsockname()), _endpoint(copy.getpeername())
            )
        except OSError:  # not connected
            return None


def _endpoint(address: Any) -> Endpoint:
    host = str(address[0])
    return host.removeprefix("::ffff:").partition("%")[0], int(address[1])


def _tcp_counters(descriptor: int) -> tuple[int, int, int] | None:
    """Acknowledged bytes, busy microseconds not limited by the receiver's window, and the delivery rate (bytes/s).

    None if this is not a TCP socket, or the kernel reports fewer fields.
    """
    info = _option(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _LEAST_INFO_BYTES:
        return None
    delivered, busy_us, full_us = _RATES(info, _RATES_AT)
    return _ACKED(info, _ACKED_AT)[0], max(busy_us - full_us, 0), delivered


def _option(descriptor: int, level: int, name: int, size_bytes: int) -> bytes:
    """A socket option, read by descriptor without a socket object; empty if it cannot be read."""
    room, size = ctypes.create_string_buffer(size_bytes), ctypes.c_uint32(size_bytes)
    status = _getsockopt()(descriptor, level, name, ctypes.addressof(room), ctypes.addressof(size))
    return room.raw[: size.value] if status == 0 else b""


@functools.cache
def _getsockopt() -> Callable[[int, int, int, int, int], int]:
    function = ctypes.CDLL(None).getsockopt
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    typed: Callable[[int, int, int, int, int], int] = function
    return typed


CLOCK_KEY = "headway/clock"
LINKS_KEY = "headway/links"
BEGIN_PATIENCE = timedelta(seconds=60)
LOOK_S = 0.5  # how often a wait checks the remaining patience

T = TypeVar("T")


class ClockComparison:
    """Compares a rank's clock with rank 0's by round trips before and after a recording."""

    def __init__(self, number: int) -> None:
        self._key = f"{CLOCK_KEY}/{number}"
        self._server: comparing.ClockServer | None = None
        self._address: tuple[str, int] | None = None
        self._secret = b""
        self._before: list[comparing.RoundTrip] = []

    def begin(self) -> None:
        """Open the port on rank 0; on other ranks, connect to it and make the first round trips.

        If no port can be opened, clocks are aligned later by the ranks' collectives and messages.
        """
        store = torch_private.default_store()
        server: dict[str, Any] = {}
        if dist.get_rank() == 0:
            self._secret = trusted.new_secret()
            with contextlib.suppress(OSError, UserError):
                address = interface.job_address()
                self._server = self._serving(address)
                server = {"address": address, "port": self._server.port, "secret": self._secret.hex()}
            store.set(self._key, json.dumps(server))
            return
        with contextlib.suppress(RuntimeError):  # rank 0 does not record, or has ended
            store.wait([self._key], BEGIN_PATIENCE)
            server = json.loads(store.get(self._key))
        if not server:
            return
        self._secret = bytes.fromhex(server["secret"])
        for host in _hosts(server["address"]):
            self._address = (host, server["port"])
            self._before = comparing.measure_round_trips(self._address, self._secret, last=False)
            if self._before:
                return

    def _serving(self, address: str) -> comparing.ClockServer:
        """Start rank 0's server: on its own address only, unless other ranks may not reach that."""
        ranks = dist.get_world_size()
        if not interface.is_loopback(address) or interface.is_on_one_host():
            with contextlib.suppress(
                OSError
            ):  # behind NAT, this machine does not have the address others use
                return comparing.ClockServer(address, self._secret, ranks)
        return comparing.ClockServer(interface.EVERY_ADDRESS, self._secret, ranks)

    def end(self, rank: int, world_size: int, patience_s: Callable[[], float]) -> ClockFit:
        """Make the last round trips and fit this rank's clock to rank 0's. Rank 0 waits for the other ranks.

        ``patience_s()`` returns how many seconds may still be waited.
        """
        if rank == 0:
            if self._server is not None:
                while not self._server.wait_for_last_rounds(world_size - 1, min(LOOK_S, patience_s())):
                    if not patience_s():
                        break
            return ClockFit()
        if self._address is None:
            return comparing.fit_clock((), ())
        after = comparing.measure_round_trips(self._address, self._secret, last=True)
        return comparing.fit_clock(self._before, after)

    def close(self) -> None:
        """Close rank 0's port."""
        if self._server is not None:
            self._server.close()


def _hosts(published: str) -> list[str]:
    """The addresses at which rank 0 may be: usually MASTER_ADDR, and the published one, which may be a loopback."""
    master = os.environ.get("MASTER_ADDR", interface.LOOPBACK)
    order = (master, published) if interface.is_loopback(published) else (published, master)
    return list(dict.fromkeys(order))


def publish_connections(number: int, connections: ConnectionWatch, patience_s: Callable[[], float]) -> None:
    """Publish this rank's connections in the job's store. Comes first, and always: the other ranks wait for it."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        with contextlib.suppress(RuntimeError):  # the store ended with the rank that hosts it
            store, key, pairs = (
                torch_private.default_store(),
                _links_key(number, dist.get_rank()),
                connections.pairs(),
            )
            _within(patience_s, lambda: store.set(key, pairs))


def connection_peers(
    number: int, connections: ConnectionWatch, rank: int, world_size: int, patience_s: Callable[[], float]
) -> dict[tuple[Endpoint, Endpoint], int]:
    """Map each connection to the rank at its other end; empty if the other ranks do not publish theirs in time."""
    if world_size == 1 or not dist.is_initialized():
        return {}
    store = torch_private.default_store()
    keys = [_links_key(number, peer) for peer in range(world_size)]
    try:
        limit = timedelta(seconds=patience_s() + LOOK_S)
        _within(patience_s, lambda: store.wait(keys, limit))
        published = _within(
            patience_s,
            lambda: {peer: store.get(key).decode() for peer, key in enumerate(keys) if peer != rank},
        )
    except RuntimeError:  # some rank has ended without publishing
        return {}
    return peers_of(connections.uses, published)


def _within(patience_s: Callable[[], float], ask: Callable[[], T]) -> T:
    """Return ``ask()``, a request to the store. Raises RuntimeError if patience runs out first, or the store is gone.

    If the process that hosts the store is frozen, requests never return, whatever their timeout: a thread makes them.
    """
    answers: list[Callable[[], T]] = []
    answered = threading.Event()

    def asks() -> None:
        try:
            answer = ask()
            answers.append(lambda: answer)
        except Exception as failure:
            answers.append(functools.partial(_raise, failure))
        answered.set()

    threading.Thread(target=asks, name="headway-store", daemon=True).start()
    while not answered.wait(LOOK_S):
        if not patience_s():
            raise RuntimeError("the store does not answer")
    return answers[0]()


def _raise(failure: Exception) -> Any:
    raise failure


def _links_key(number: int, rank: int) -> str:
    return f"{LINKS_KEY}/{number}/{rank}"
