"""What the kernel knows of this process's TCP connections: how much each carried, and for how long it was busy.

Native collectives say when they begin and end, not what they send to whom. The kernel counts it for every connection,
whoever opened it, and asking costs a microsecond. ``linux/tcp.h`` describes the structure that is read.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_INFO_BYTES = 232
_ACKED, _RATES = struct.Struct("=Q").unpack_from, struct.Struct("=QQQ").unpack_from
_ACKED_AT = 120  # tcpi_bytes_acked
_RATES_AT = 160  # tcpi_delivery_rate in bytes a second; tcpi_busy_time and tcpi_rwnd_limited in microseconds
_DESCRIPTORS = Path("/proc/self/fd")
MAX_CONNECTIONS = 4096
LEAST_BYTES = 65_536  # a connection that carries less in a whole recording is no link of the job

Endpoint = tuple[str, int]


@dataclass(slots=True)
class _Connection:
    """One connection: a descriptor of our own for it, and what it had carried when it was last looked at."""

    socket: socket.socket
    local: Endpoint
    remote: Endpoint
    acked_bytes: int = 0
    busy_us: int = 0


@dataclass(slots=True)
class Use:
    """What a connection sent in one step, and for how long it was held up by nothing but the network.

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
    """Samples every connection of this process at the ends of steps. Does nothing where the kernel does not tell."""

    uses: list[Use] = field(default_factory=list)
    _connections: dict[str, _Connection] = field(default_factory=dict)
    _since_ns: int = 0

    def begin(self, now_ns: int) -> None:
        """Count from now on."""
        self._find()
        for one in self._connections.values():
            one.acked_bytes, one.busy_us, _ = _read(one.socket)
        self._since_ns = now_ns

    def end_step(self, step: int, now_ns: int) -> None:
        """Note what was sent since the last look."""
        if not self._since_ns:
            return
        for one in self._connections.values():
            acked_bytes, busy_us, delivered = _read(one.socket)
            if acked_bytes > one.acked_bytes:
                self.uses.append(
                    Use(
                        one.local, one.remote, step, self._since_ns, now_ns,
                        acked_bytes - one.acked_bytes, max(busy_us - one.busy_us, 1) * 1000, delivered,
                    )
                )  # fmt: skip
            one.acked_bytes, one.busy_us = acked_bytes, busy_us
        self._since_ns = now_ns

    def close(self) -> None:
        """Let go of the connections."""
        for one in self._connections.values():
            one.socket.close()
        self._connections.clear()
        self._since_ns = 0

    def pairs(self) -> str:
        """Both ends of every connection, for other ranks to recognise theirs among."""
        return json.dumps([[one.local, one.remote] for one in self._connections.values()])

    def _find(self) -> None:
        if sys.platform != "linux":
            return
        try:
            names = os.listdir(_DESCRIPTORS)
        except OSError:
            return
        for name in names:
            try:
                target = os.readlink(_DESCRIPTORS / name)
                if target.startswith("socket:") and target not in self._connections:
                    found = _opened(int(name))
                    if found is not None and len(self._connections) < MAX_CONNECTIONS:
                        self._connections[target] = found
            except (OSError, ValueError):
                continue


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


def _opened(descriptor: int) -> _Connection | None:
    """A TCP connection behind ``descriptor``, through a descriptor of our own; None for any other socket."""
    own = socket.socket(fileno=os.dup(descriptor))
    try:
        if own.type == socket.SOCK_STREAM and own.family in (socket.AF_INET, socket.AF_INET6):
            connection = _Connection(own, _endpoint(own.getsockname()), _endpoint(own.getpeername()))
            _read(own)
            return connection
    except (OSError, struct.error):
        pass
    own.close()
    return None


def _endpoint(address: Any) -> Endpoint:
    host = str(address[0])
    return host.removeprefix("::ffff:").partition("%")[0], int(address[1])


def _read(connection: socket.socket) -> tuple[int, int, int]:
    """Bytes that arrived, microseconds in which some were under way and there was room, and a rate of arrival."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        delivered, busy_us, full_us = _RATES(info, _RATES_AT)
        return _ACKED(info, _ACKED_AT)[0], max(busy_us - full_us, 0), delivered
    except (OSError, struct.error):  # closed meanwhile, or a kernel that tells less
        return 0, 0, 0
