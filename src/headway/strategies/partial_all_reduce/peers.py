"""Requests between workers: a server for this worker, connections to others, and boards for groups.

Connections are authenticated (``headway.rpc.trusted``). Every request has a deadline, so a peer that was killed, stopped
or cut off costs a bounded time.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from headway.rpc import frames
from headway.rpc.frames import Frame, FrameError, FrameServer, Header, Limits, endpoint
from headway.rpc.trusted import connect
from headway.strategies.partial_all_reduce.coordinator.messages import Member

MAX_ROOMS = 1024
MAX_KEYS = 4096
MAX_VALUE_BYTES = 2**16
CLOSED_KEPT = 4096


class RoomClosedError(ConnectionError):
    """The group of the room has ended."""


class Board:
    """Exchanges small values among the members of a group, in one room per group.

    The first member of a group holds its room: if that member dies, the group cannot average anyway. A room opens on
    first use and ends with ``close``; later users get RoomClosedError. The number of rooms is bounded: a new room may
    evict the oldest.
    """

    def __init__(self) -> None:
        self._rooms: OrderedDict[str, dict[str, bytes]] = OrderedDict()
        self._closed: deque[str] = deque(maxlen=CLOSED_KEPT)
        self._changed = threading.Condition()

    def put(self, room: str, key: str, value: bytes) -> None:
        """Store ``value``. Raises RoomClosedError, or ValueError if it is too large or the room is full."""
        with self._changed:
            values = self._room(room)
            if len(value) > MAX_VALUE_BYTES or len(values) >= MAX_KEYS:
                raise ValueError("a group's room is full, or the value is too large")
            values[key] = value
            self._changed.notify_all()

    def get(self, room: str, keys: Sequence[str], deadline: float) -> list[bytes]:
        """Wait for the values of all ``keys``. Raises TimeoutError past ``deadline``, RoomClosedError."""
        with self._changed:
            while True:
                values = self._room(room)
                if all(key in values for key in keys):
                    return [values[key] for key in keys]
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError("a member of the group did not arrive in time")
                self._changed.wait(left_s)

    def close(self, room: str) -> None:
        """Close ``room`` and drop its values."""
        with self._changed:
            self._rooms.pop(room, None)
            self._closed.append(room)
            self._changed.notify_all()

    @property
    def rooms(self) -> int:
        """Number of open rooms."""
        return len(self._rooms)

    def _room(self, room: str) -> dict[str, bytes]:
        if room in self._closed:
            raise RoomClosedError("the group has ended")
        if room not in self._rooms:
            self._rooms[room] = {}
            if len(self._rooms) > MAX_ROOMS:
                self._closed.append(self._rooms.popitem(last=False)[0])
                self._changed.notify_all()
        return self._rooms[room]


CAPACITY = 512
IDLE_S = 600.0  # after this time without a request a connection is closed; clients reconnect
LONGEST_ANSWER_S = 3600.0
MAX_KEYS_ASKED = 4096

Handler = Callable[[socket.socket, Header, bytes, float], None]
"""Answers a request, given its connection, header, payload and deadline."""


class PeerRefusedError(ConnectionError):
    """A peer rejected a request."""


class Room(Protocol):
    """A group's room, local or remote."""

    def put(self, key: str, value: bytes) -> None:
        """Store a value for the group. Raises OSError."""

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for the values of all keys. Raises OSError, TimeoutError."""


class PeerServer:
    """Answers other workers at ``address``. Raises OSError if it cannot listen on ``host``."""

    def __init__(self, host: str, secret: bytes) -> None:
        self.board = Board()
        self._handlers: dict[str, Handler] = {"put": self._put, "get": self._get}
        self._server = FrameServer(host, secret, self._answer, capacity=CAPACITY, name="headway-peers")
        self.address = self._server.address

    def handle(self, kind: str, handler: Handler) -> None:
        """Answer requests of ``kind`` with ``handler``, on their own threads."""
        self._handlers[kind] = handler

    def close(self) -> None:
        """Stop answering."""
        self._server.close()

    def _answer(self, connection: socket.socket) -> None:
        while True:
            idle = time.monotonic() + IDLE_S
            header, payload = frames.receive(connection, Limits(payload_bytes=MAX_VALUE_BYTES), idle)
            handler = self._handlers.get(str(header.get("kind")))
            wait_s = header.get("wait_s")
            if handler is None or not isinstance(wait_s, (int, float)):
                raise FrameError("an unknown request")
            deadline = time.monotonic() + min(float(wait_s), LONGEST_ANSWER_S)
            self._answer_one(handler, connection, header, bytes(payload), deadline)

    @staticmethod
    def _answer_one(
        handler: Handler, connection: socket.socket, header: Header, payload: bytes, deadline: float
    ) -> None:
        try:
            handler(connection, header, payload, deadline)
        except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            frames.send(connection, {"failed": str(error)[:200]}, b"", time.monotonic() + 1.0)

    def _put(self, connection: socket.socket, header: Header, payload: bytes, deadline: float) -> None:
        self.board.put(str(header["room"]), str(header["key"]), payload)
        frames.send(connection, {}, b"", deadline)

    def _get(self, connection: socket.socket, header: Header, payload: bytes, deadline: float) -> None:
        del payload
        keys = header["keys"]
        if not isinstance(keys, list) or len(keys) > MAX_KEYS_ASKED:
            raise FrameError("too many keys at once")
        values = self.board.get(str(header["room"]), [str(key) for key in keys], deadline)
        sizes = [len(value) for value in values]
        frames.send(connection, {"sizes": sizes}, values, deadline + 1.0)


class Peers:
    """Sends requests to other workers. Keeps up to ``kept`` connections open. Not thread-safe."""

    def __init__(self, secret: bytes, kept: int = 64) -> None:
        self._secret = secret
        self._kept = kept
        self._connections: dict[str, socket.socket] = {}

    def connect(self, member: Member, deadline: float) -> socket.socket:
        """Open a connection to ``member`` for the caller. Raises OSError, TimeoutError."""
        return connect(endpoint(member.address), self._secret, deadline)

    def ask(
        self,
        member: Member,
        header: dict[str, Any],
        payload: bytes,
        deadline: float,
        max_payload_bytes: int = 0,
    ) -> Frame:
        """Send a request and return the answer. Raises OSError or TimeoutError without one before ``deadline``."""
        kept = self._connections.pop(member.address, None)
        if kept is not None:
            try:
                return self._exchange(kept, member, header, payload, deadline, max_payload_bytes)
            except PeerRefusedError:
                raise
            except OSError:  # closed because it was idle: reconnect
                pass
        return self._exchange(
            self.connect(member, deadline), member, header, payload, deadline, max_payload_bytes
        )

    def _exchange(
        self, connection: socket.socket, member: Member, header: dict[str, Any], payload: bytes, deadline: float,
        max_payload_bytes: int,
    ) -> Frame:  # fmt: skip
        try:
            wait_s = max(0.0, deadline - time.monotonic())
            frames.send(connection, {**header, "wait_s": wait_s}, payload, deadline)
            answer = frames.receive(connection, Limits(payload_bytes=max_payload_bytes), deadline + 1.0)
        except BaseException:
            connection.close()
            raise
        self._connections[member.address] = connection
        while len(self._connections) > self._kept:
            self._connections.pop(next(iter(self._connections))).close()
        if "failed" in answer.header:
            raise PeerRefusedError(str(answer.header["failed"])[:200])
        return answer

    def close(self) -> None:
        """Close all open connections."""
        while self._connections:
            self._connections.popitem()[1].close()


class LocalRoom:
    """A room on this worker's board."""

    def __init__(self, board: Board, name: str, deadline: float) -> None:
        self._board, self._name, self._deadline = board, name, deadline

    def put(self, key: str, value: bytes) -> None:
        """Store a value for the group."""
        self._board.put(self._name, key, value)

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for the values of all keys."""
        return self._board.get(self._name, keys, self._deadline)


class RemoteRoom:
    """A room on the board of ``holder``."""

    def __init__(self, peers: Peers, holder: Member, name: str, deadline: float) -> None:
        self._peers, self._holder, self._name, self._deadline = peers, holder, name, deadline

    def put(self, key: str, value: bytes) -> None:
        """Store a value for the group."""
        self._ask({"kind": "put", "room": self._name, "key": key}, value, 0)

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for the values of all keys."""
        request = {"kind": "get", "room": self._name, "keys": list(keys)}
        header, payload = self._ask(request, b"", MAX_VALUE_BYTES * max(1, len(keys)))
        sizes = header.get("sizes")
        if not isinstance(sizes, list) or len(sizes) != len(keys) or sum(sizes) != len(payload):
            raise FrameError("an answer does not match its request")
        values, place = [], 0
        for size in sizes:
            values.append(bytes(payload[place : place + size]))
            place += size
        return values

    def _ask(self, request: dict[str, Any], payload: bytes, limit: int) -> Frame:
        return self._peers.ask(self._holder, request, payload, self._deadline, limit)


def room_of(
    name: str, holder: Member, member: Member, server: PeerServer, peers: Peers, deadline: float
) -> Room:
    """Return the room ``name`` on the board of ``holder``, which may be this worker."""
    if holder.worker == member.worker:
        return LocalRoom(server.board, name, deadline)
    return RemoteRoom(peers, holder, name, deadline)
