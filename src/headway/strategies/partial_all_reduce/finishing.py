"""Finishing: the workers' last models become one, by a last mean over all live workers or as one worker has it.

Workers leave their groups first. The live worker of the lowest number collects what each has at its end and gives each
the mean, so that all hold the same bits, and everybody learns who is in it. A worker that has joined lately may not
know that one yet: it asks the lowest that it knows, who hands on what it gets.

Who has not finished in time is left out, of whatever number: asked for its model, or for what is agreed, it concedes
(``finals``), never collects, and ends with what the others agreed on or with an error. So workers that reach each other
have one final model.
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
MAX_KNOWN = 65536
MAX_TOLD = 128


class PeerDirectory:
    """Every other worker as it was last heard of: there at the joining, met in groups, or because it said hello."""

    def __init__(self, member: Member, server: PeerServer) -> None:
        self.member = member
        """This worker, as it tells others of itself."""
        self._members: dict[int, Member] = {}
        server.handle("hello", self._hello)

    @property
    def peers(self) -> list[Member]:
        """By their numbers."""
        return [member for _, member in sorted(dict(self._members).items())]

    def add(self, members: Iterable[Member], *, at_first_hand: bool = False) -> None:
        """Remember where ``members`` are: they have said so themselves, or nothing of a later incarnation is known."""
        for member in members:
            if member.worker == self.member.worker or len(self._members) >= MAX_KNOWN:
                continue
            held = self._members.get(member.worker)
            if held is None or at_first_hand or member.incarnation >= held.incarnation:
                self._members[member.worker] = member

    def listing(self) -> list[dict[str, Any]]:
        """Workers that this one has heard of, and another one perhaps not, as JSON."""
        return [as_json(member) for member in self.peers[:MAX_TOLD]]

    def merge(self, entries: Any) -> None:
        """Remember workers that another one has told of and this one does not know. Raises FrameError."""
        members = [member_from(entry) for entry in entries[:MAX_TOLD]] if isinstance(entries, list) else []
        self.add(member for member in members if member.worker not in self._members)

    def say_hello(self, peers: Peers) -> None:
        """Tell the others that this worker is there, and hear of more; those that do not answer are left alone.

        A coordinator that was away for a lease knows only who has come back to it, and so tells less than peers do.
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
    """The member of such an object. Raises FrameError where it is none."""
    if isinstance(document, Mapping):
        match dict(document):
            case {"worker": int(w), "incarnation": int(i), "address": str(a), "host": str(h)}:
                if 0 <= w < 2**31 and len(a) < 300 and len(h) < 300:
                    return Member(w, i, a, h)
    raise FrameError("no member of a job")


CONNECT_S = 10.0
"""Who does not answer a connection for so long is lost; whoever only has not finished does answer it."""

Kind = Literal["final", "agreed"]


# Finals: what a worker ended with and what workers agreed on, given to those that ask, and asked of others.
#
# A worker that is asked and has not finished by the time that its asker names **concedes**, for good: the others end
# without its model, and it takes what they agreed on.


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

    def __init__(self, member: Member, directory: PeerDirectory, server: PeerServer, peers: Peers) -> None:
        self._own, self._directory, self._peers = member.worker, directory, peers
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
                raise ConcededError("it has not finished, or finished too late")
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
        """What is asked for, once it is there; None where this worker has conceded or the time is over."""

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
"""Of the time limit, how much is waited for those who have not finished: the others must still get the mean."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Whose models the final one is the mean of: ``workers``, this one's ``given_by``. One worker: its own model."""

    workers: tuple[Worker, ...]
    given_by: Worker


@dataclass(slots=True)
class _Collection:
    """What a collector has been given until now, and by whom not."""

    finals: dict[Worker, Final]
    contacted: set[Member] = field(default_factory=set)
    conceded: set[Worker] = field(default_factory=set)
    pending: int = 0
    failure: LayoutError | None = None


class Finishing:
    """One worker's side of the end."""

    def __init__(self, member: Member, directory: PeerDirectory, server: PeerServer, peers: Peers) -> None:
        self._own, self._directory = member.worker, directory
        self._finals = Finals(member, directory, server, peers)

    def finish(
        self, flat: Flat, digest: str, source: Worker | None, timeout_s: float
    ) -> tuple[Flat, Finished]:
        """The final values, given this worker's; with ``source`` they are that worker's, else the mean over all.

        Raises CommunicationError where nobody gives them within ``timeout_s``: ``flat`` stays this worker's own.
        """
        deadline = time.monotonic() + timeout_s
        collected_by = time.monotonic() + COLLECTING * timeout_s
        final = Final(flat, digest, (self._own,))
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
            if source == self._own:
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
        """Who is to be asked next for the final model; None where it is this worker that gives it, or nobody does.

        Who did not answer and asks for something now is there after all: it may collect, or give, a model of its own.
        """
        for member in self._directory.peers:
            first = self._finals.conceded or member.worker < self._own
            waits = member not in contacted or member.worker in self._finals.heard
            if (first if source is None else member.worker == source) and waits:
                return member
        return None

    def _pass_on(self, agreed: Final, giver: Worker, deadline: float) -> tuple[Flat, Finished]:
        """Hand on what others agreed on to those who ask this worker for it: they may not know whom else to ask."""
        self._finals.agree(agreed)
        self._finals.wait_for_askers(deadline)
        return agreed.flat, Finished(agreed.workers, giver)

    def _serve(self, final: Final, awaited: Collection[Worker], deadline: float) -> tuple[Flat, Finished]:
        """Give ``final`` to those that wait for it, and to those that are late as long as there is time."""
        self._finals.wait_for_served(awaited, deadline)
        return final.flat, Finished(final.workers, self._own)

    def _failure(
        self, source: Worker | None, timeout_s: float, failures: Sequence[str]
    ) -> CommunicationError:
        late = (
            "the others ended without this worker, which finished too late: " if self._finals.conceded else ""
        )
        reasons = one_line("; ".join(failures)) or f"worker {source} is not known"
        return CommunicationError(
            f"worker {self._own}: {late}nobody gave the final model within {timeout_s:g} s ({reasons}). "
            "This worker's own model is as it was: save that. Where workers end at very different times, "
            "call finish() with a longer timeout_s on all."
        )

    def _collected(
        self, final: Final, until: float, transfer_s: float, earlier: Collection[Member]
    ) -> _Collection | None:
        """What all end with that finish before ``until``; what is there may take ``transfer_s`` to arrive.

        All are asked at the same time. None where it is found out meanwhile that a worker besides ``earlier`` goes
        first. Raises LayoutError.
        """
        collection = _Collection({self._own: final})
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
        """Add what one worker ends with, on a thread of its own."""
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
