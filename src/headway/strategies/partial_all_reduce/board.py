"""Board: where the members of a group leave each other small values, held by the group's first member.

It dies with that member, and then the group cannot average anyway; nothing depends on a store of the whole job.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence

MAX_ROOMS = 1024
MAX_KEYS = 4096
MAX_VALUE_BYTES = 2**16
CLOSED_KEPT = 4096


class RoomClosedError(ConnectionError):
    """The group whose room it was has ended."""


class Board:
    """Values by key in rooms, each of one group. Bounded: the oldest room makes place for a new one.

    A room begins with whoever comes first and ends with ``close``; whoever comes later is told at once.
    """

    def __init__(self) -> None:
        self._rooms: OrderedDict[str, dict[str, bytes]] = OrderedDict()
        self._closed: deque[str] = deque(maxlen=CLOSED_KEPT)
        self._changed = threading.Condition()

    def put(self, room: str, key: str, value: bytes) -> None:
        """Leave ``value``. Raises RoomClosedError, ValueError where it is too large or there are too many."""
        with self._changed:
            values = self._room(room)
            if len(value) > MAX_VALUE_BYTES or len(values) >= MAX_KEYS:
                raise ValueError("too much for one group's room")
            values[key] = value
            self._changed.notify_all()

    def get(self, room: str, keys: Sequence[str], deadline: float) -> list[bytes]:
        """The values of ``keys`` once all are there. Raises TimeoutError past ``deadline``, RoomClosedError."""
        with self._changed:
            while True:
                values = self._room(room)
                if all(key in values for key in keys):
                    return [values[key] for key in keys]
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError("a member of the group did not come in time")
                self._changed.wait(left_s)

    def close(self, room: str) -> None:
        """Forget what is in ``room``."""
        with self._changed:
            self._rooms.pop(room, None)
            self._closed.append(room)
            self._changed.notify_all()

    @property
    def rooms(self) -> int:
        """How many rooms are open."""
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
