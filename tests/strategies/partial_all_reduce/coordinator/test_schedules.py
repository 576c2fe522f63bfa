"""Random schedules of joins, questions, votes, losses and crashes, against a model of what must hold.

The model knows nothing of the ledger's inside: it sees events and what is said, as workers do.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from headway.strategies.partial_all_reduce.coordinator import ledger
from headway.strategies.partial_all_reduce.coordinator.journal import Journal
from headway.strategies.partial_all_reduce.coordinator.ledger import Answer, Decision
from headway.strategies.partial_all_reduce.coordinator.messages import GroupStart, Member
from headway.strategies.partial_all_reduce.coordinator.options import GeneratorChoice

WORKERS = 6
STEPS = 120
CHOICES = [
    GeneratorChoice("all"),
    GeneratorChoice("pairs", {"neighbours": "any"}),
    GeneratorChoice("random", {"group_size": 3}),
    GeneratorChoice("first-come", {"group_size": 3}),
    GeneratorChoice("group-buffer", {"group_size": 3}),
]


class Model:
    """What workers have heard, and what must hold of it."""

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        self.incarnations: dict[int, int] = {}
        self.waiting: set[int] = set()
        self.running: dict[int, tuple[GroupStart, set[int]]] = {}
        self.decided: dict[int, tuple[bool, str]] = {}
        self.keys: set[str] = set()
        self.expected: list[tuple[int, bool]] = []  # decisions that must follow from the event

    def joined(self, member: Member) -> None:
        assert member.incarnation > self.incarnations.get(member.worker, 0)
        self.incarnations[member.worker] = member.incarnation
        self.members[member.worker] = member

    def left(self, worker: int) -> None:
        member = self.members.pop(worker)
        self.waiting.discard(worker)
        for number, (start, votes) in self.running.items():
            if member in start.members and worker not in votes:
                self.expected.append((number, False))

    def voted(self, worker: int, number: int, reduced: bool) -> None:
        start, votes = self.running[number]
        if not reduced:
            self.expected.append((number, False))
            return
        votes.add(worker)
        if votes == {member.worker for member in start.members}:
            self.expected.append((number, True))

    def said(self, said: Sequence[Answer]) -> None:
        decisions = [(one.number, one.committed) for one in said if isinstance(one, Decision)]
        assert sorted(decisions) == sorted(self.expected)
        self.expected = []
        for one in said:
            if isinstance(one, Decision):
                assert one.number not in self.decided, "decided twice"
                self.decided[one.number] = (one.committed, one.key)
                del self.running[one.number]
            else:
                self.started(one)

    def started(self, start: GroupStart) -> None:
        assert start.key not in self.keys, "a key was used before"
        self.keys.add(start.key)
        busy = {member.worker for other, _ in self.running.values() for member in other.members}
        for member in start.members:
            assert self.members[member.worker] == member
            assert member.worker in self.waiting, "it did not ask, or was granted a group before"
            assert member.worker not in busy, "two groups that run share a worker"
            self.waiting.discard(member.worker)
        if len(start.members) > 1:
            self.running[start.number] = (start, set())


class Play:
    """One schedule: draws what happens next, and does it."""

    def __init__(self, seed: int, path: Path) -> None:
        self.random = random.Random(seed)
        self.choice = CHOICES[seed % len(CHOICES)]
        self.path = path
        self.model = Model()
        self.now_ns = 0
        self.boot()

    def boot(self) -> None:
        self.journal = Journal(self.path, str(self.choice))
        self.ledger = self.journal.open(self.choice.make, "job")
        assert self.ledger.now_ns <= self.now_ns
        self.do(ledger.Booted(now_ns=self.now_ns, boot=f"{self.random.getrandbits(32):08x}"))
        for worker in sorted(self.model.members):
            self.withdraw(worker)

    def do(self, event: ledger.AnyEvent) -> None:
        said = self.ledger.apply(event)
        self.journal.append(event, said)
        self.model.said(said)
        if self.random.random() < 0.02:
            self.journal.compact(self.ledger)

    def crash(self) -> None:
        """The process is killed, perhaps while it writes a line that it has told nobody of."""
        self.journal.close()
        if self.random.random() < 0.5:
            with self.path.open("ab") as file:
                file.write(
                    b'0badcafe {"event":{"now_ns":1,"ki' + (b"\n" if self.random.random() < 0.5 else b"")
                )
        self.boot()
        assert [member for _, member in sorted(self.model.members.items())] == list(self.ledger.members)
        for number, (committed, key) in self.model.decided.items():
            assert self.ledger.decision(number, key) is committed
            assert self.ledger.decision(number, "another") is None

    def join(self, worker: int) -> None:
        incarnation = self.model.incarnations.get(worker, 0) + 1
        self.model.joined(Member(worker, incarnation, f"{worker}:1", f"host {worker % 2}"))
        self.do(
            ledger.Joined(
                now_ns=self.now_ns, worker=worker, session=f"{self.random.getrandbits(128):032x}",
                address=f"{worker}:1", host=f"host {worker % 2}",
            )
        )  # fmt: skip

    def leave(self, worker: int) -> None:
        self.model.left(worker)
        self.do(ledger.Left(now_ns=self.now_ns, worker=worker, reason=self.random.choice(["left", "lease"])))

    def withdraw(self, worker: int) -> None:
        self.model.waiting.discard(worker)
        self.do(ledger.Withdrew(now_ns=self.now_ns, worker=worker))

    def ask(self, worker: int) -> None:
        self.model.waiting.add(worker)
        self.do(ledger.Asked(now_ns=self.now_ns, worker=worker, iteration=0))

    def vote(self, worker: int, reduced: bool) -> None:
        start = self.ledger.running_with(self.model.members[worker])
        assert start is not None
        assert not self.ledger.may_vote(self.model.members[worker], start.number, "another")
        self.model.voted(worker, start.number, reduced)
        self.do(
            ledger.Voted(
                now_ns=self.now_ns, worker=worker, number=start.number, key=start.key, reduced=reduced
            )
        )

    def step(self) -> None:
        self.now_ns += self.random.randrange(10**7)
        wake_ns = self.ledger.wake_ns
        if wake_ns is not None and wake_ns <= self.now_ns:
            self.do(ledger.Woke(now_ns=self.now_ns))
        worker = self.random.randrange(WORKERS)
        if worker not in self.model.members:
            self.join(worker)
        elif (drawn := self.random.random()) < 0.04:
            self.crash()
        elif drawn < 0.08:
            self.leave(worker)
        elif drawn < 0.1:
            self.withdraw(worker)
        elif self.ledger.running_with(self.model.members[worker]) and self.random.random() < 0.8:
            self.vote(worker, reduced=self.random.random() < 0.9)
        else:
            self.ask(worker)

    def settle(self) -> None:
        """Once all vote and nobody asks any more, every group ends."""
        while self.model.running:
            start, votes = next(iter(self.model.running.values()))
            for member in start.members:
                if self.model.members.get(member.worker) == member and member.worker not in votes:
                    self.vote(member.worker, reduced=True)
                    break
        assert self.ledger.running == 0


@pytest.mark.parametrize("seed", range(100))
def test_what_must_hold_does(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)  # nothing here loses its power
    play = Play(seed, tmp_path / "journal")
    for _ in range(STEPS):
        play.step()
    play.settle()
    play.journal.close()
