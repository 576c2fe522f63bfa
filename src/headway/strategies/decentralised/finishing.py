"""Finishing: the workers' last models become one, by a last mean over all live workers or as one worker has it.

Workers leave their groups first. The live worker of the lowest number collects what each has at its end, in the order
of the workers' numbers, and gives each the mean, so that all hold the same bits. Who has not finished in time, or died,
is left out, and everybody learns who is in it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headway.coordination.generator import Worker
from headway.coordination.membership import Member
from headway.errors import CommunicationError, one_line
from headway.rpc.trusted import receive_exactly
from headway.strategies.decentralised import frames
from headway.strategies.decentralised.averaged import Flat
from headway.strategies.decentralised.contexts import LayoutError
from headway.strategies.decentralised.frames import Header
from headway.strategies.decentralised.known import Known, as_json, member_from
from headway.strategies.decentralised.peers import Peers, PeerServer
from headway.strategies.decentralised.rounds import mean_of

COLLECTING = 0.5
"""Of the time limit, how much is waited for those who have not finished: the others must still get the mean."""

MAX_TOLD = 128
CONNECT_S = 10.0
"""Who does not answer a connection for so long is lost; whoever only has not finished does answer it."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Whose models the final one is the mean of: ``workers``, this one's ``given_by``. One worker: its own model."""

    workers: tuple[Worker, ...]
    given_by: Worker


@dataclass(frozen=True, slots=True)
class _Final:
    flat: Flat
    digest: str
    workers: tuple[Worker, ...]


class Finishing:
    """One worker's side of the end."""

    def __init__(self, own: Member, known: Known, server: PeerServer, peers: Peers) -> None:
        self._own, self._known, self._peers = own, known, peers
        self._changed = threading.Condition()
        self._finals: dict[str, _Final] = {}  # what this worker ended with, and what is agreed on
        self._served: set[Worker] = set()
        server.handle("final", self._give)
        server.handle("agreed", self._give)

    def finish(
        self, flat: Flat, digest: str, source: Worker | None, timeout_s: float
    ) -> tuple[Flat, Finished]:
        """The final values, given this worker's; with ``source`` they are that worker's, else the mean over all.

        Raises CommunicationError where nobody gives them within ``timeout_s``: ``flat`` stays this worker's own.
        """
        deadline = time.monotonic() + timeout_s
        own = _Final(flat, digest, (self._own.worker,))
        self._set("final", own)
        if source is None:
            earlier = [each for each in self._known.others if each.worker < self._own.worker]
        else:
            earlier = [each for each in self._known.others if each.worker == source]
        failures = []
        for member in earlier:
            try:
                found = self._ask(member, "agreed", own, deadline)
            except OSError as error:
                failures.append(
                    f"worker {member.worker}: {one_line(str(error), 100) or type(error).__name__}"
                )
            else:
                return found.flat, Finished(found.workers, member.worker)
        if time.monotonic() >= deadline or (source is not None and source != self._own.worker):
            raise CommunicationError(
                f"worker {self._own.worker}: nobody gave the final model within {timeout_s:g} s "
                f"({one_line('; '.join(failures)) or f'worker {source} is not known'}). "
                "This worker's own model is as it was; save that, or call finish() with more time."
            )
        agreed = own if source is not None else self._collected(own, timeout_s)
        self._set("agreed", agreed)
        awaited = set(agreed.workers) if source is None else {each.worker for each in self._known.others}
        with self._changed:  # until those that wait for it have it
            self._changed.wait_for(
                lambda: awaited - {self._own.worker} <= self._served, max(0.0, deadline - time.monotonic())
            )
        return agreed.flat, Finished(agreed.workers, self._own.worker)

    def _collected(self, own: _Final, timeout_s: float) -> _Final:
        until = time.monotonic() + COLLECTING * timeout_s
        found = {self._own.worker: own.flat}
        asked: set[Member] = set()
        while waiting := [each for each in self._known.others if each not in asked]:
            for member in waiting:
                asked.add(member)
                try:
                    found[member.worker] = self._ask(member, "final", own, until).flat
                except OSError:  # it has not finished, or is gone
                    continue
        workers = tuple(sorted(found))
        mean = Flat([torch.empty_like(whole) for whole in own.flat.wholes])
        mean_of([found[worker] for worker in workers], mean)
        return _Final(mean, own.digest, workers)

    def _told(self) -> list[dict[str, Any]]:
        """Workers that this one has met, and another one perhaps not."""
        return [as_json(member) for member in self._known.others[:MAX_TOLD]]

    def _set(self, kind: str, final: _Final) -> None:
        with self._changed:
            self._finals[kind] = final
            self._changed.notify_all()

    def _give(self, connection: socket.socket, header: Header, _payload: bytes, deadline: float) -> None:
        kind, asker = str(header["kind"]), member_from(header.get("member"))
        self._known.add([asker, *_members(header.get("known"))])
        with self._changed:
            self._changed.wait_for(lambda: kind in self._finals, max(0.0, deadline - time.monotonic()))
            final = self._finals.get(kind)
        if final is None:
            raise TimeoutError("this worker has not finished")
        answer = {
            "digest": final.digest, "workers": list(final.workers), "known": self._told(),
            "sizes": [[str(whole.dtype), whole.numel()] for whole in final.flat.wholes],
        }  # fmt: skip
        frames.send(connection, answer, b"", deadline + 1.0)
        for whole in final.flat.wholes:
            frames.send_raw(connection, whole.view(torch.uint8).numpy().data, deadline + 60.0)
        if kind == "agreed":
            with self._changed:
                self._served.add(asker.worker)
                self._changed.notify_all()

    def _ask(self, member: Member, kind: str, own: _Final, deadline: float) -> _Final:
        reached_by = min(deadline, time.monotonic() + CONNECT_S)
        with self._peers.connect(member, reached_by) as connection:
            wait_s = max(0.0, deadline - time.monotonic())
            request: Mapping[str, Any] = {
                "kind": kind, "member": as_json(self._own), "known": self._told(), "wait_s": wait_s
            }  # fmt: skip
            frames.send(connection, request, b"", deadline)
            header, _ = frames.receive(connection, deadline, max_payload_bytes=0)
            if "failed" in header:
                raise ConnectionError(str(header["failed"])[:200])
            self._known.add(_members(header.get("known")))
            sizes = [[str(whole.dtype), whole.numel()] for whole in own.flat.wholes]
            if header.get("digest") != own.digest or header.get("sizes") != sizes:
                raise LayoutError("workers do not average the same tensors", got=f"worker {member.worker}")
            wholes = [
                torch.frombuffer(
                    receive_exactly(connection, whole.numel() * whole.element_size(), deadline), dtype=whole.dtype
                )
                for whole in own.flat.wholes
            ]  # fmt: skip
            return _Final(Flat(wholes), own.digest, _workers(header.get("workers")))


def _members(found: Any) -> list[Member]:
    given: Sequence[Any] = found[:MAX_TOLD] if isinstance(found, list) else []
    return [member_from(each) for each in given]


def _workers(found: Any) -> tuple[Worker, ...]:
    given: Sequence[Any] = found if isinstance(found, list) else []
    return tuple(worker for worker in given if isinstance(worker, int))
