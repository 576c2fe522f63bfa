"""Finals: what a worker ended with and what workers agreed on, given to those that ask, and asked of others.

A worker that is asked and has not finished by the time that its asker names **concedes**, for good: the others end
without its model, and it takes what they agreed on.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from headway.coordination.generator import Worker
from headway.coordination.membership import Member
from headway.rpc.trusted import receive_exactly
from headway.strategies.live.averaged import Flat
from headway.strategies.partial_all_reduce import frames
from headway.strategies.partial_all_reduce.contexts import LayoutError
from headway.strategies.partial_all_reduce.frames import Header
from headway.strategies.partial_all_reduce.known import Known, as_json, member_from
from headway.strategies.partial_all_reduce.peers import Peers, PeerServer

CONNECT_S = 10.0
"""Who does not answer a connection for so long is lost; whoever only has not finished does answer it."""

Kind = Literal["final", "agreed"]


class ConcededError(ConnectionError):
    """A worker has not finished, or finished too late: others end without its model."""


@dataclass(frozen=True, slots=True)
class Final:
    """Values of which ``workers``' models are the mean; ``agreed``, or what one of them ended with."""

    flat: Flat
    digest: str
    workers: tuple[Worker, ...]
    agreed: bool = False


class Finals:
    """One worker's, and its way to those of others. ``changed`` is notified whenever something is new."""

    def __init__(self, own: Member, known: Known, server: PeerServer, peers: Peers) -> None:
        self._own, self._known, self._peers = own.worker, known, peers
        self.heard: set[Worker] = set()
        """Workers that have asked for something since ``ask`` asked them for what is agreed: they are there."""
        self.changed = threading.Condition()
        self.conceded = False
        self._final: Final | None = None
        self._agreed: Final | None = None
        self._served: set[Worker] = set()
        self._waiting = 0  # requests for what is agreed on that are being answered
        server.handle("final", self._give)
        server.handle("agreed", self._give)

    def end_with(self, final: Final) -> None:
        """This worker has finished: from here on it does not concede."""
        with self.changed:
            self._final = final
            self.changed.notify_all()

    def agree(self, agreed: Final, unless: Callable[[], bool] = lambda: False) -> bool:
        """Give ``agreed`` to those that ask, unless something has come first; returns whether nothing has."""
        with self.changed:
            if unless():
                return False
            self._agreed = agreed
            self.changed.notify_all()
            return True

    def wait_for_served(self, workers: Collection[Worker], deadline: float) -> None:
        """Until those have what is agreed on."""
        with self.changed:
            self.changed.wait_for(
                lambda: set(workers) - {self._own} <= self._served,
                max(0.0, deadline - time.monotonic()),
            )

    def wait_for_askers(self, deadline: float) -> None:
        """Until all that ask at present have what is agreed on."""
        with self.changed:
            self.changed.wait_for(lambda: not self._waiting, max(0.0, deadline - time.monotonic()))

    def ask(
        self, member: Member, kind: Kind, like: Final, deadline: float, *, concede_by: float | None
    ) -> Final:
        """What ``member`` ended with, or what is agreed on, before ``deadline``; the latter wherever it is known.

        If it has not finished by ``concede_by`` it concedes. Raises ConcededError, OSError, TimeoutError, and
        LayoutError where it is not of the layout of ``like``.
        """
        reached_by = min(deadline, time.monotonic() + CONNECT_S)
        with self._peers.connect(member, reached_by) as connection:
            now = time.monotonic()
            request: Mapping[str, Any] = {
                "kind": kind, "member": as_json(self._known.own), "known": self._known.told(),
                "wait_s": max(0.0, deadline - now),
                "concede_s": None if concede_by is None else max(0.0, concede_by - now),
            }  # fmt: skip
            frames.send(connection, request, b"", deadline)
            header, _ = frames.receive(connection, deadline, max_payload_bytes=0)
            if "failed" in header:
                raise ConnectionError(str(header["failed"])[:200])
            self._known.hear(header.get("known"))
            if header.get("conceded"):
                raise ConcededError("it has not finished, or finished too late")
            sizes = [[str(whole.dtype), whole.numel()] for whole in like.flat.wholes]
            if header.get("digest") != like.digest or header.get("sizes") != sizes:
                raise LayoutError("workers do not average the same tensors", got=f"worker {member.worker}")
            wholes = [
                torch.frombuffer(
                    receive_exactly(connection, whole.numel() * whole.element_size(), deadline), dtype=whole.dtype
                )
                for whole in like.flat.wholes
            ]  # fmt: skip
            workers = _workers(header.get("workers"))
            return Final(Flat(wholes), like.digest, workers, agreed=bool(header.get("agreed")))

    def _give(self, connection: socket.socket, header: Header, _payload: bytes, deadline: float) -> None:
        wants_agreed, asker = header["kind"] == "agreed", member_from(header.get("member"))
        self._known.add([asker], at_first_hand=True)  # before it may be answered: see ``agree``
        self._known.hear(header.get("known"))
        with self.changed:
            self.heard.add(asker.worker)
            self._waiting += wants_agreed
            self.changed.notify_all()
        try:
            final = self._awaited(wants_agreed, header.get("concede_s"), deadline)
            self._answer(connection, final, deadline)
            if final is not None and wants_agreed:
                with self.changed:
                    self._served.add(asker.worker)
        finally:
            with self.changed:
                self._waiting -= wants_agreed
                self.changed.notify_all()

    def _awaited(self, wants_agreed: bool, concede_s: Any, deadline: float) -> Final | None:
        """What is asked for, once it is there; None where this worker has conceded or the time is over."""

        def found() -> Final | None:
            return self._agreed or (None if wants_agreed else self._final)

        def answered() -> bool:
            return found() is not None or self.conceded

        with self.changed:
            if isinstance(concede_s, (int, float)):
                self.changed.wait_for(answered, max(0.0, float(concede_s)))
                if self._final is None:
                    self.conceded = True
                    self.changed.notify_all()
            self.changed.wait_for(answered, max(0.0, deadline - time.monotonic()))
            return found()

    def _answer(self, connection: socket.socket, final: Final | None, deadline: float) -> None:
        if final is None:
            if not self.conceded:
                raise TimeoutError("it has not finished")
            frames.send(connection, {"conceded": True, "known": self._known.told()}, b"", deadline + 1.0)
            return
        answer = {
            "digest": final.digest, "workers": list(final.workers), "agreed": final.agreed,
            "known": self._known.told(),
            "sizes": [[str(whole.dtype), whole.numel()] for whole in final.flat.wholes],
        }  # fmt: skip
        frames.send(connection, answer, b"", deadline + 1.0)
        for whole in final.flat.wholes:
            frames.send_raw(connection, whole.view(torch.uint8).numpy().data, deadline + 60.0)


def _workers(found: Any) -> tuple[Worker, ...]:
    given: Sequence[Any] = found if isinstance(found, list) else []
    return tuple(worker for worker in given if isinstance(worker, int))
