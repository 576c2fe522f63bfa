"""Known: the other workers that this one has heard of, and where they are."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from headway.coordination.membership import Member
from headway.strategies.partial_all_reduce import frames
from headway.strategies.partial_all_reduce.frames import FrameError, Header
from headway.strategies.partial_all_reduce.peers import Peers, PeerServer

HELLO_S = 2.0
MAX_KNOWN = 65536
MAX_TOLD = 128


class Known:
    """Every other worker as it was last heard of: there at the joining, met in groups, or because it said hello."""

    def __init__(self, own: Member, server: PeerServer) -> None:
        self.own = own
        """This worker, as it tells others of itself."""
        self._members: dict[int, Member] = {}
        server.handle("hello", self._hello)

    @property
    def others(self) -> list[Member]:
        """By their numbers."""
        return [member for _, member in sorted(dict(self._members).items())]

    def add(self, members: Iterable[Member], *, at_first_hand: bool = False) -> None:
        """Remember where ``members`` are: they have said so themselves, or nothing of a later incarnation is known."""
        for member in members:
            if member.worker == self.own.worker or len(self._members) >= MAX_KNOWN:
                continue
            known = self._members.get(member.worker)
            if known is None or at_first_hand or member.incarnation >= known.incarnation:
                self._members[member.worker] = member

    def told(self) -> list[dict[str, Any]]:
        """Workers that this one has heard of, and another one perhaps not, as JSON."""
        return [as_json(member) for member in self.others[:MAX_TOLD]]

    def hear(self, told: Any) -> None:
        """Remember workers that another one has told of and this one does not know. Raises FrameError."""
        members = [member_from(each) for each in told[:MAX_TOLD]] if isinstance(told, list) else []
        self.add(each for each in members if each.worker not in self._members)

    def say_hello(self, peers: Peers) -> None:
        """Tell the others that this worker is there, and hear of more; those that do not answer are left alone.

        A coordinator that was away for a lease knows only who has come back to it, and so tells less than peers do.
        """
        greeted: set[Member] = set()
        while waiting := [each for each in self.others if each not in greeted]:
            for member in waiting:
                greeted.add(member)
                with suppress(OSError):
                    request = {"kind": "hello", "member": as_json(self.own)}
                    answer, _ = peers.ask(member, request, b"", time.monotonic() + HELLO_S)
                    self.hear(answer.get("known"))

    def _hello(self, connection: socket.socket, header: Header, _payload: bytes, deadline: float) -> None:
        self.add([member_from(header["member"])], at_first_hand=True)
        frames.send(connection, {"known": self.told()}, b"", deadline)


def as_json(member: Member) -> dict[str, Any]:
    """``member`` as a JSON object."""
    return {
        "worker": member.worker, "incarnation": member.incarnation, "address": member.address, "host": member.host
    }  # fmt: skip


def member_from(found: Any) -> Member:
    """The member of such an object. Raises FrameError where it is none."""
    if isinstance(found, Mapping):
        match dict(found):
            case {"worker": int(w), "incarnation": int(i), "address": str(a), "host": str(h)}:
                if 0 <= w < 2**31 and len(a) < 300 and len(h) < 300:
                    return Member(w, i, a, h)
    raise FrameError("no member of a job")
