"""What the kernel knows of this process's TCP connections: how much each carried, and for how long it was busy.

Native collectives say when they begin and end, not what they send to whom. The kernel counts it for every connection,
whoever opened it, and asking costs some microseconds. ``linux/tcp.h`` describes the structure that is read.
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from headway import torch_private
from headway.clocks import comparing
from headway.errors import UserError
from headway.rpc import interface, trusted
from headway.trace.format import ClockFit

_INFO_BYTES = 232
_ACKED, _RATES = struct.Struct("=Q").unpack_from, struct.Struct("=QQQ").unpack_from
_ACKED_AT = 120  # tcpi_bytes_acked
_RATES_AT = 160  # tcpi_delivery_rate in bytes a second; tcpi_busy_time and tcpi_rwnd_limited in microseconds
_LEAST_INFO_BYTES = 184
_DESCRIPTORS = Path("/proc/self/fd")
MAX_CONNECTIONS = 4096
LEAST_BYTES = 65_536  # a connection that carries less in a whole recording is no link of the job

OFTEN, SELDOM = 4, 8  # new connections are looked for after so many steps, and then after every so manieth

Endpoint = tuple[str, int]


@dataclass(slots=True)
class _Connection:
    """One connection: where the process has it open, and what it had carried when it was last looked at."""

    descriptor: int
    inode: int  # the socket's: once it is closed, another one may get its descriptor
    local: Endpoint
    remote: Endpoint
    is_open: bool = True
    acked_bytes: int = 0
    busy_us: int = 0


@dataclass(slots=True)
class Use:
    """What a connection sent in one step, and for how long it was held up by nothing but the network.

    The kernel counts that time in ticks, of which there are 100 to 1000 a second: it is right over many steps only.
    ``delivered_bytes_a_s`` is the kernel's latest estimate of the rate at which data arrive. It stays high where a
    receiver's acknowledgements are what is held up, which makes a connection busy that is not slow.
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
class ConnectionWatch:
    """Samples every connection of this process at the ends of steps. Does nothing where the kernel does not tell.

    It keeps no connection open: what the process closes is closed, and the peer learns of it. What such a
    connection carried since the last look is not counted.
    """

    uses: list[Use] = field(default_factory=list)
    _connections: list[_Connection] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)  # descriptors that were looked at
    _since_ns: int = 0
    _ends: int = 0  # of steps, since the beginning

    def begin(self, now_ns: int) -> None:
        """Count from now on."""
        self._find()
        for connection in self._connections:
            self._look(connection)
        self._since_ns, self._ends = now_ns, 0

    def end_step(self, step: int, now_ns: int) -> None:
        """Note what was sent since the last look.

        Connections that were opened meanwhile are found at the ends of the first steps, and of every eighth after them.
        """
        if not self._since_ns:
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

    def close(self) -> None:
        """Forget the connections."""
        self._connections.clear()
        self._seen.clear()
        self._since_ns = 0

    def pairs(self) -> str:
        """Both ends of every connection, for other ranks to recognise theirs among."""
        return json.dumps([[connection.local, connection.remote] for connection in self._connections])

    def _find(self) -> None:
        """Take up connections whose descriptors are new."""
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
            except OSError:  # closed meanwhile, as the one that the listing took
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
        """Bring a connection up to date; the rate of delivery, 0 where it is closed."""
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
    """The rank at the other end of each connection that carried something, from what ranks published of theirs."""
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


def _opened(descriptor: int, inode: int) -> _Connection | None:
    """The TCP connection behind ``descriptor``; None for any other socket."""
    family = int.from_bytes(_option(descriptor, socket.SOL_SOCKET, socket.SO_DOMAIN, 4), sys.byteorder)
    if family not in (socket.AF_INET, socket.AF_INET6) or _tcp_counters(descriptor) is None:
        return None
    try:
        copied = os.dup(descriptor)  # a socket object closes what it is given
    except OSError:
        return None
    try:
        # Said not to block, or else a default timeout of the process would be set on the job's own connection.
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
    """Bytes that arrived, microseconds in which some were in flight and there was room, and a rate of arrival.

    None for what is no TCP socket, or where the kernel tells less.
    """
    info = _option(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _LEAST_INFO_BYTES:
        return None
    delivered, busy_us, full_us = _RATES(info, _RATES_AT)
    return _ACKED(info, _ACKED_AT)[0], max(busy_us - full_us, 0), delivered


def _option(descriptor: int, level: int, name: int, size_bytes: int) -> bytes:
    """A socket's option by its descriptor alone, without a socket object; nothing where there is none."""
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
LOOK_S = 0.5  # how often it is asked how long to wait on

T = TypeVar("T")


class ClockComparison:
    """Round trips between a rank's clock and rank 0's, before a recording and after it."""

    def __init__(self, number: int) -> None:
        self._key = f"{CLOCK_KEY}/{number}"
        self._server: comparing.ClockServer | None = None
        self._address: tuple[str, int] | None = None
        self._secret = b""
        self._before: list[comparing.RoundTrip] = []

    def begin(self) -> None:
        """Open rank 0's port, or find it and make the first round trips.

        Where there can be none, clocks are not compared: what ranks do together tells how far they are apart.
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
        with contextlib.suppress(RuntimeError):  # rank 0 does not record, or is gone
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
        """Rank 0's server: on its own address alone, unless that may be none that others reach."""
        ranks = dist.get_world_size()
        if not interface.is_loopback(address) or interface.is_on_one_host():
            with contextlib.suppress(OSError):  # others know this machine by an address that is translated
                return comparing.ClockServer(address, self._secret, ranks)
        return comparing.ClockServer(interface.EVERY_ADDRESS, self._secret, ranks)

    def end(self, rank: int, world_size: int, patience_s: Callable[[], float]) -> ClockFit:
        """Make the last round trips, which rank 0 waits for; how this rank's clock is brought onto rank 0's.

        ``patience_s`` says how long to wait from now on.
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
    """Where rank 0 may be: it usually lives where everybody met, and may take its loopback for its address."""
    master = os.environ.get("MASTER_ADDR", interface.LOOPBACK)
    order = (master, published) if interface.is_loopback(published) else (published, master)
    return list(dict.fromkeys(order))


def publish_connections(number: int, connections: ConnectionWatch, patience_s: Callable[[], float]) -> None:
    """Tell others of this rank's connections, first of all and in every case: they wait for it."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        with contextlib.suppress(RuntimeError):  # the store went with the rank that kept it
            store, key, pairs = (
                torch_private.default_store(),
                _links_key(number, dist.get_rank()),
                connections.pairs(),
            )
            _within(patience_s, lambda: store.set(key, pairs))


def connection_peers(
    number: int, connections: ConnectionWatch, rank: int, world_size: int, patience_s: Callable[[], float]
) -> dict[tuple[Endpoint, Endpoint], int]:
    """Which rank is at the other end of each connection; nothing where others do not say in time."""
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
    except RuntimeError:  # a rank that is gone publishes nothing
        return {}
    return peers_of(connections.uses, published)


def _within(patience_s: Callable[[], float], ask: Callable[[], T]) -> T:
    """What ``ask`` has of the store. Raises RuntimeError where patience is over before, or the store is gone.

    A store whose keeper is frozen answers nothing, and heeds no limit of its own: a thread asks it.
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
