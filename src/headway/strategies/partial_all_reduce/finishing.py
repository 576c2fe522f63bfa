"""Finishing: the workers' last models become one, by a last mean over all live workers or as one worker has it.

Workers leave their groups first. The live worker of the lowest number collects what each has at its end and gives each
the mean, so that all hold the same bits, and everybody learns who is in it. A worker that has joined lately may not
know that one yet: it asks the lowest that it knows, who hands on what it gets.

Who has not finished in time is left out, of whatever number: asked for its model, or for what is agreed, it concedes
(``finals``), never collects, and ends with what the others agreed on or with an error. So workers that reach each other
have one final model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from headway.coordination.generator import Worker
from headway.coordination.membership import Member
from headway.errors import CommunicationError, one_line
from headway.strategies.live.averaged import Flat
from headway.strategies.partial_all_reduce.contexts import LayoutError
from headway.strategies.partial_all_reduce.finals import ConcededError, Final, Finals
from headway.strategies.partial_all_reduce.known import Known
from headway.strategies.partial_all_reduce.peers import Peers, PeerServer
from headway.strategies.partial_all_reduce.rounds import mean_of

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

    found: dict[Worker, Final]
    asked: set[Member] = field(default_factory=set)
    conceded: set[Worker] = field(default_factory=set)
    pending: int = 0
    failure: LayoutError | None = None


class Finishing:
    """One worker's side of the end."""

    def __init__(self, own: Member, known: Known, server: PeerServer, peers: Peers) -> None:
        self._own, self._known = own.worker, known
        self._finals = Finals(own, known, server, peers)

    def finish(
        self, flat: Flat, digest: str, source: Worker | None, timeout_s: float
    ) -> tuple[Flat, Finished]:
        """The final values, given this worker's; with ``source`` they are that worker's, else the mean over all.

        Raises CommunicationError where nobody gives them within ``timeout_s``: ``flat`` stays this worker's own.
        """
        deadline = time.monotonic() + timeout_s
        collected_by = time.monotonic() + COLLECTING * timeout_s
        own = Final(flat, digest, (self._own,))
        self._finals.end_with(own)
        asked: set[Member] = set()
        failures = []
        while True:
            if (member := self._giver(source, asked)) is not None:
                asked.add(member)
                self._finals.heard.discard(member.worker)
                concede_by = None if self._finals.conceded or source is not None else collected_by
                try:
                    found = self._finals.ask(member, "agreed", own, deadline, concede_by=concede_by)
                except OSError as error:
                    failures.append(
                        f"worker {member.worker}: {one_line(str(error), 100) or type(error).__name__}"
                    )
                    continue
                return self._taken(found, member.worker, deadline)
            if source == self._own:
                self._finals.agree(replace(own, agreed=True))
                return self._given(own, {each.worker for each in self._known.others}, deadline)
            if time.monotonic() >= deadline or source is not None or self._finals.conceded:
                raise self._not_given(source, timeout_s, failures)
            collection = self._collected(own, collected_by, COLLECTING / 2 * timeout_s, asked)
            if collection is None:
                continue
            for worker, found in collection.found.items():
                if found.agreed:
                    return self._taken(found, worker, deadline)
            mean = _mean(collection.found, digest)
            if self._finals.agree(mean, unless=lambda: self._giver(None, asked) is not None):
                return self._given(mean, {*mean.workers, *collection.conceded}, deadline)

    def _giver(self, source: Worker | None, asked: Collection[Member]) -> Member | None:
        """Who is to be asked next for the final model; None where it is this worker that gives it, or nobody does.

        Who did not answer and asks for something now is there after all: it may collect, or give, a model of its own.
        """
        for member in self._known.others:
            first = self._finals.conceded or member.worker < self._own
            waits = member not in asked or member.worker in self._finals.heard
            if (first if source is None else member.worker == source) and waits:
                return member
        return None

    def _taken(self, agreed: Final, giver: Worker, deadline: float) -> tuple[Flat, Finished]:
        """Hand on what others agreed on to those who ask this worker for it: they may not know whom else to ask."""
        self._finals.agree(agreed)
        self._finals.wait_for_askers(deadline)
        return agreed.flat, Finished(agreed.workers, giver)

    def _given(self, final: Final, awaited: Collection[Worker], deadline: float) -> tuple[Flat, Finished]:
        """Give ``final`` to those that wait for it, and to those that are late as long as there is time."""
        self._finals.wait_for_served(awaited, deadline)
        return final.flat, Finished(final.workers, self._own)

    def _not_given(
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
        self, own: Final, until: float, transfer_s: float, earlier: Collection[Member]
    ) -> _Collection | None:
        """What all end with that finish before ``until``; what is there may take ``transfer_s`` to arrive.

        All are asked at the same time. None where it is found out meanwhile that a worker besides ``earlier`` goes
        first. Raises LayoutError.
        """
        collection = _Collection({self._own: own})
        arrived_by = max(until, time.monotonic() + transfer_s)

        def goes_first() -> bool:
            return self._giver(None, earlier) is not None

        def unasked() -> list[Member]:
            return [each for each in self._known.others if each not in collection.asked]

        def ask(member: Member) -> None:
            self._collect(collection, member, own, until, arrived_by)

        while True:
            with self._finals.changed:
                self._finals.changed.wait_for(lambda: goes_first() or unasked() or not collection.pending)
                if goes_first():
                    return None
                if not (waiting := unasked()):
                    break
                collection.pending += len(waiting)
            collection.asked.update(waiting)
            for member in waiting:
                threading.Thread(target=ask, args=(member,), name="headway-collect", daemon=True).start()
        if collection.failure is not None:
            raise collection.failure
        return collection

    def _collect(
        self, collection: _Collection, member: Member, own: Final, until: float, arrived_by: float
    ) -> None:
        """Add what one worker ends with, on a thread of its own."""
        try:
            found = self._finals.ask(member, "final", own, arrived_by + 1.0, concede_by=until)
            collection.found[member.worker] = found
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


def _mean(found: Mapping[Worker, Final], digest: str) -> Final:
    workers = tuple(sorted(found))
    flats = [found[worker].flat for worker in workers]
    mean = Flat([torch.empty_like(whole) for whole in flats[0].wholes])
    mean_of(flats, mean)
    return Final(mean, digest, workers, agreed=True)
