"""Ends training with one model: the mean over all live workers, or the model of one of them.

Workers leave their groups first. The live worker of the lowest number collects all final models and sends the mean back,
so that all workers hold the same bits and know whose models are in it. A worker that joined recently may not know the
collector yet: it asks the lowest worker that it knows, which passes on what it receives.

A worker that has not finished in time is left out, whatever its number: when asked for its model or the agreed one, it
concedes, never collects, and ends with the model that the others agreed on or with an error. So workers that can reach
each other end with one model.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from headway.errors import CommunicationError, one_line
from headway.rpc import frames
from headway.rpc.frames import FrameError, Header, Limits
from headway.rpc.trusted import receive_exactly
from headway.strategies.live.averaged import Flat
from headway.strategies.partial_all_reduce.coordinator.messages import Member
from headway.strategies.partial_all_reduce.generators.generator import Worker
from headway.strategies.partial_all_reduce.peers import Peers, PeerServer
from headway.strategies.partial_all_reduce.rounds import LayoutError, mean_of

HELLO_S = 2.0
MAX_PEERS = 65536
MAX_LISTED = 128


class PeerDirectory:
    """The other workers and their addresses: known from joining, from groups, or because they said hello."""

    def __init__(self, member: Member, server: PeerServer) -> None:
        self.member = member
        """Description of this worker for others."""
        self._members: dict[int, Member] = {}
        server.handle("hello", self._hello)

    @property
    def peers(self) -> list[Member]:
        """The other workers, by number."""
        return [member for _, member in sorted(dict(self._members).items())]

    def add(self, members: Iterable[Member], *, at_first_hand: bool = False) -> None:
        """Add ``members``, unless a later incarnation is known and they did not report it ``at_first_hand``."""
        for member in members:
            if member.worker == self.member.worker or len(self._members) >= MAX_PEERS:
                continue
            held = self._members.get(member.worker)
            if held is None or at_first_hand or member.incarnation >= held.incarnation:
                self._members[member.worker] = member

    def listing(self) -> list[dict[str, Any]]:
        """Return known workers as JSON, for other workers."""
        return [as_json(member) for member in self.peers[:MAX_LISTED]]

    def merge(self, entries: Any) -> None:
        """Add unknown workers from another worker's ``listing``. Raises FrameError if it is malformed."""
        members = [member_from(entry) for entry in entries[:MAX_LISTED]] if isinstance(entries, list) else []
        self.add(member for member in members if member.worker not in self._members)

    def say_hello(self, peers: Peers) -> None:
        """Announce this worker to all others and learn of more; workers that do not answer are skipped.

        A coordinator that was down for a lease knows only workers that have reconnected, so peers may know more.
        """
        greeted: set[Member] = set()
        while waiting := [peer for peer in self.peers if peer not in greeted]:
            for member in waiting:
                greeted.add(member)
                with suppress(OSError):
                    request = {"kind": "hello", "member": as_json(self.member)}
                    answer, _ = peers.ask(member, request, b"", time.monotonic() + HELLO_S)
                    self.merge(answer.get("known"))

    def _hello(self, connection: socket.socket, header: Header, _payload: bytes, deadline: float) -> None:
        self.add([member_from(header["member"])], at_first_hand=True)
        frames.send(connection, {"known": self.listing()}, b"", deadline)


def as_json(member: Member) -> dict[str, Any]:
    """``member`` as a JSON object."""
    return {
        "worker": member.worker, "incarnation": member.incarnation, "address": member.address, "host": member.host
    }  # fmt: skip


def member_from(document: Any) -> Member:
    """Return the member of a JSON object. Raises FrameError if it is malformed."""
    if isinstance(document, Mapping):
        match dict(document):
            case {"worker": int(w), "incarnation": int(i), "address": str(a), "host": str(h)}:
                if 0 <= w < 2**31 and len(a) < 300 and len(h) < 300:
                    return Member(w, i, a, h)
    raise FrameError("invalid worker description")


CONNECT_S = 10.0
"""A worker that does not accept a connection in this time is lost; one that is merely busy does accept it."""

Kind = Literal["final", "agreed"]


class ConcededError(ConnectionError):
    """A worker has conceded: it did not finish in time, and the others end without its model."""


@dataclass(frozen=True, slots=True)
class Final:
    """A final model: the ``agreed`` mean of the models of ``workers``, or the model of one worker."""

    flat: Flat
    digest: str
    workers: tuple[Worker, ...]
    agreed: bool = False


class Finals:
    """Serves this worker's final model and the agreed one, and requests those of others.

    A worker that is asked and has not finished by the requested time concedes for good: the others end without its
    model, and it takes the agreed one. ``changed`` is notified of every change.
    """

    def __init__(self, member: Member, directory: PeerDirectory, server: PeerServer, peers: Peers) -> None:
        self._worker, self._directory, self._peers = member.worker, directory, peers
        self.heard: set[Worker] = set()
        """Workers that sent a request after they were last asked for the agreed model, so they are alive."""
        self.changed = threading.Condition()
        self.conceded = False
        self._final: Final | None = None
        self._agreed: Final | None = None
        self._served: set[Worker] = set()
        self._waiting = 0  # pending requests for the agreed model
        server.handle("final", self._give)
        server.handle("agreed", self._give)

    def end_with(self, final: Final) -> None:
        """Set this worker's final model: from now on it does not concede."""
        with self.changed:
            self._final = final
            self.changed.notify_all()

    def agree(self, agreed: Final, unless: Callable[[], bool] = lambda: False) -> bool:
        """Publish ``agreed`` unless ``unless()`` is true; returns whether it was published."""
        with self.changed:
            if unless():
                return False
            self._agreed = agreed
            self.changed.notify_all()
            return True

    def wait_for_served(self, workers: Collection[Worker], deadline: float) -> None:
        """Wait until ``workers`` have received the agreed model."""
        with self.changed:
            self.changed.wait_for(
                lambda: set(workers) - {self._worker} <= self._served,
                max(0.0, deadline - time.monotonic()),
            )

    def wait_for_askers(self, deadline: float) -> None:
        """Wait until all current requests for the agreed model are answered."""
        with self.changed:
            self.changed.wait_for(lambda: not self._waiting, max(0.0, deadline - time.monotonic()))

    def ask(
        self, member: Member, kind: Kind, like: Final, deadline: float, *, concede_by: float | None
    ) -> Final:
        """Request the final or the agreed model from ``member``; the agreed one is returned if it is known.

        A member that has not finished by ``concede_by`` concedes. Raises ConcededError, OSError, TimeoutError, and
        LayoutError if its layout differs from ``like``.
        """
        reached_by = min(deadline, time.monotonic() + CONNECT_S)
        with self._peers.connect(member, reached_by) as connection:
            now = time.monotonic()
            request: Mapping[str, Any] = {
                "kind": kind, "member": as_json(self._directory.member), "known": self._directory.listing(),
                "wait_s": max(0.0, deadline - now),
                "concede_s": None if concede_by is None else max(0.0, concede_by - now),
            }  # fmt: skip
            frames.send(connection, request, b"", deadline)
            header, _ = frames.receive(connection, Limits(), deadline)
            if "failed" in header:
                raise ConnectionError(str(header["failed"])[:200])
            self._directory.merge(header.get("known"))
            if header.get("conceded"):
                raise ConcededError("it has not finished or finished too late")
            sizes = [[str(tensor.dtype), tensor.numel()] for tensor in like.flat.wholes]
            if header.get("digest") != like.digest or header.get("sizes") != sizes:
                raise LayoutError("workers do not average the same tensors", got=f"worker {member.worker}")
            wholes = [
                torch.frombuffer(
                    receive_exactly(connection, tensor.numel() * tensor.element_size(), deadline), dtype=tensor.dtype
                )
                for tensor in like.flat.wholes
            ]  # fmt: skip
            workers = _workers(header.get("workers"))
            return Final(Flat(wholes), like.digest, workers, agreed=bool(header.get("agreed")))

    def _give(self, connection: socket.socket, header: Header, _payload: bytes, deadline: float) -> None:
        wants_agreed, asker = header["kind"] == "agreed", member_from(header.get("member"))
        self._directory.add([asker], at_first_hand=True)  # before it may be answered: see ``agree``
        self._directory.merge(header.get("known"))
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
        """Wait for the requested model; None if this worker has conceded or the deadline passes."""

        def available() -> Final | None:
            return self._agreed or (None if wants_agreed else self._final)

        def answered() -> bool:
            return available() is not None or self.conceded

        with self.changed:
            if isinstance(concede_s, (int, float)):
                self.changed.wait_for(answered, max(0.0, float(concede_s)))
                if self._final is None:
                    self.conceded = True
                    self.changed.notify_all()
            self.changed.wait_for(answered, max(0.0, deadline - time.monotonic()))
            return available()

    def _answer(self, connection: socket.socket, final: Final | None, deadline: float) -> None:
        if final is None:
            if not self.conceded:
                raise TimeoutError("it has not finished")
            frames.send(
                connection, {"conceded": True, "known": self._directory.listing()}, b"", deadline + 1.0
            )
            return
        answer = {
            "digest": final.digest, "workers": list(final.workers), "agreed": final.agreed,
            "known": self._directory.listing(),
            "sizes": [[str(tensor.dtype), tensor.numel()] for tensor in final.flat.wholes],
        }  # fmt: skip
        frames.send(connection, answer, b"", deadline + 1.0)
        for tensor in final.flat.wholes:
            frames.send_raw(connection, tensor.view(torch.uint8).numpy().data, deadline + 60.0)


def _workers(entries: Any) -> tuple[Worker, ...]:
    workers: Sequence[Any] = entries if isinstance(entries, list) else []
    return tuple(worker for worker in workers if isinstance(worker, int))


COLLECTING = 0.5
"""Share of the time limit to wait for workers that have not finished; the rest is for sending the mean."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Result of ``finish``: the final model is the mean over ``workers`` and was sent by worker ``given_by``."""

    workers: tuple[Worker, ...]
    given_by: Worker


@dataclass(slots=True)
class _Collection:
    """Final models that a collector has received so far, and workers that conceded."""

    finals: dict[Worker, Final]
    contacted: set[Member] = field(default_factory=set)
    conceded: set[Worker] = field(default_factory=set)
    pending: int = 0
    failure: LayoutError | None = None


class Finishing:
    """Carries out the end of training for one worker."""

    def __init__(self, member: Member, directory: PeerDirectory, server: PeerServer, peers: Peers) -> None:
        self._worker, self._directory = member.worker, directory
        self._finals = Finals(member, directory, server, peers)

    def finish(
        self, flat: Flat, digest: str, source: Worker | None, timeout_s: float
    ) -> tuple[Flat, Finished]:
        """Return the final values: those of worker ``source``, or the mean over all workers.

        Raises CommunicationError if they do not arrive within ``timeout_s``; ``flat`` is then unchanged.
        """
        deadline = time.monotonic() + timeout_s
        collected_by = time.monotonic() + COLLECTING * timeout_s
        final = Final(flat, digest, (self._worker,))
        self._finals.end_with(final)
        contacted: set[Member] = set()
        failures = []
        while True:
            if (member := self._giver(source, contacted)) is not None:
                contacted.add(member)
                self._finals.heard.discard(member.worker)
                concede_by = None if self._finals.conceded or source is not None else collected_by
                try:
                    answer = self._finals.ask(member, "agreed", final, deadline, concede_by=concede_by)
                except OSError as error:
                    failures.append(
                        f"worker {member.worker}: {one_line(str(error), 100) or type(error).__name__}"
                    )
                    continue
                return self._pass_on(answer, member.worker, deadline)
            if source == self._worker:
                self._finals.agree(replace(final, agreed=True))
                return self._serve(final, {peer.worker for peer in self._directory.peers}, deadline)
            if time.monotonic() >= deadline or source is not None or self._finals.conceded:
                raise self._failure(source, timeout_s, failures)
            collection = self._collected(final, collected_by, COLLECTING / 2 * timeout_s, contacted)
            if collection is None:
                continue
            for worker, answer in collection.finals.items():
                if answer.agreed:
                    return self._pass_on(answer, worker, deadline)
            mean = _mean(collection.finals, digest)
            if self._finals.agree(mean, unless=lambda: self._giver(None, contacted) is not None):
                return self._serve(mean, {*mean.workers, *collection.conceded}, deadline)

    def _giver(self, source: Worker | None, contacted: Collection[Member]) -> Member | None:
        """Return the worker to ask next for the final model; None if this worker provides it, or no worker does.

        A worker that did not answer but sends requests now is alive after all and may collect models itself.
        """
        for member in self._directory.peers:
            first = self._finals.conceded or member.worker < self._worker
            waits = member not in contacted or member.worker in self._finals.heard
            if (first if source is None else member.worker == source) and waits:
                return member
        return None

    def _pass_on(self, agreed: Final, giver: Worker, deadline: float) -> tuple[Flat, Finished]:
        """Pass the agreed model on to workers that ask this one, since they may not know the collector."""
        self._finals.agree(agreed)
        self._finals.wait_for_askers(deadline)
        return agreed.flat, Finished(agreed.workers, giver)

    def _serve(self, final: Final, awaited: Collection[Worker], deadline: float) -> tuple[Flat, Finished]:
        """Serve ``final`` until all ``awaited`` workers have it or the deadline passes."""
        self._finals.wait_for_served(awaited, deadline)
        return final.flat, Finished(final.workers, self._worker)

    def _failure(
        self, source: Worker | None, timeout_s: float, failures: Sequence[str]
    ) -> CommunicationError:
        late = (
            "the others finished without this worker, which was too late: " if self._finals.conceded else ""
        )
        reasons = one_line("; ".join(failures)) or f"worker {source} is unknown"
        return CommunicationError(
            f"worker {self._worker}: {late}no worker sent the final model within {timeout_s:g} s ({reasons}). "
            "This worker's own model is unchanged: save it. If workers finish at very different times, "
            "call finish() with a longer timeout_s on all of them."
        )

    def _collected(
        self, final: Final, until: float, transfer_s: float, earlier: Collection[Member]
    ) -> _Collection | None:
        """Collect the final models of all workers that finish before ``until``; transfers may take ``transfer_s``.

        All workers are asked concurrently. Returns None if a worker outside ``earlier`` turns out to take precedence.
        Raises LayoutError.
        """
        collection = _Collection({self._worker: final})
        arrived_by = max(until, time.monotonic() + transfer_s)

        def goes_first() -> bool:
            return self._giver(None, earlier) is not None

        def unasked() -> list[Member]:
            return [peer for peer in self._directory.peers if peer not in collection.contacted]

        def ask(member: Member) -> None:
            self._collect(collection, member, final, until, arrived_by)

        while True:
            with self._finals.changed:
                self._finals.changed.wait_for(lambda: goes_first() or unasked() or not collection.pending)
                if goes_first():
                    return None
                if not (waiting := unasked()):
                    break
                collection.pending += len(waiting)
            collection.contacted.update(waiting)
            for member in waiting:
                threading.Thread(target=ask, args=(member,), name="headway-collect", daemon=True).start()
        if collection.failure is not None:
            raise collection.failure
        return collection

    def _collect(
        self, collection: _Collection, member: Member, final: Final, until: float, arrived_by: float
    ) -> None:
        """Collect the final model of one worker, on its own thread."""
        try:
            answer = self._finals.ask(member, "final", final, arrived_by + 1.0, concede_by=until)
            collection.finals[member.worker] = answer
        except ConcededError:
            collection.conceded.add(member.worker)
        except LayoutError as error:
            collection.failure = error
        except OSError:  # it is gone
            pass
        finally:
            with self._finals.changed:
                collection.pending -= 1
                self._finals.changed.notify_all()


def _mean(finals: Mapping[Worker, Final], digest: str) -> Final:
    workers = tuple(sorted(finals))
    flats = [finals[worker].flat for worker in workers]
    mean = Flat([torch.empty_like(tensor) for tensor in flats[0].wholes])
    mean_of(flats, mean)
    return Final(mean, digest, workers, agreed=True)
