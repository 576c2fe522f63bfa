"""Workers as a plain model, which holds every answer of a generator against what a generator promises."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.strategies.partial_all_reduce.generators.generator import Grant, GroupGenerator
from headway.strategies.partial_all_reduce.generators.rules import generator_of

HOSTS = {worker: f"host{worker // 2}" for worker in range(64)}


@dataclass
class Watched:
    """A generator, and who is there, waits and runs by its own answers."""

    generator: GroupGenerator
    present: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    running: dict[int, tuple[tuple[int, ...], frozenset[int]]] = field(default_factory=dict)  # and who left
    next_number: int = 0
    now_ns: int = 0

    @property
    def inside(self) -> set[int]:
        return {each for members, gone in self.running.values() for each in members if each not in gone}

    @property
    def free(self) -> list[int]:
        return sorted(self.present - self.waiting - self.inside)

    def join(self, worker: int) -> Sequence[Grant]:
        self.present.add(worker)
        return self._checked(self.generator.join(worker, self.now_ns))

    def leave(self, worker: int) -> Sequence[Grant]:
        self.present.discard(worker)
        self.waiting.discard(worker)
        self.running = {
            number: (members, gone | {worker} if worker in members else gone)
            for number, (members, gone) in self.running.items()
        }
        return self._checked(self.generator.leave(worker, self.now_ns))

    def ask(self, worker: int) -> Sequence[Grant]:
        self.waiting.add(worker)
        return self._checked(self.generator.ask(worker, self.now_ns))

    def ended(self, number: int) -> Sequence[Grant]:
        del self.running[number]
        return self._checked(self.generator.ended(number, self.now_ns))

    def wake(self) -> Sequence[Grant]:
        """Let time pass until the generator wants to be asked, and ask it: it must not want that again at once."""
        wake_ns = self.generator.wake_ns
        assert wake_ns is not None
        self.now_ns = max(self.now_ns, wake_ns)
        grants = self._checked(self.generator.wake(self.now_ns))
        assert grants, "a deadline that comes lets somebody go"
        return grants

    def _checked(self, grants: Sequence[Grant]) -> Sequence[Grant]:
        for grant in grants:
            assert grant.number == self.next_number, "grants are counted"
            self.next_number += 1
            assert grant.members
            assert list(grant.members) == sorted(set(grant.members)), "members ascend"
            assert set(grant.members) <= self.waiting, "members have asked and wait"
            busy = {each for members, _ in self.running.values() for each in members}
            assert not busy & set(grant.members), "nobody is in two groups that run"
            self.waiting -= set(grant.members)
            if len(grant.members) > 1:
                self.running[grant.number] = (grant.members, frozenset())
        stuck = self.present and self.waiting == self.present and not self.running
        assert not stuck, "all wait, and nobody is granted a group"
        return grants

    def fair_rounds(self, most: int) -> None:
        """Have deadlines come, groups end and free workers ask, until whoever waits now was granted a group."""
        owed = set(self.waiting)
        for _ in range(most):
            if not owed:
                return
            granted: list[Grant] = []
            if self.generator.wake_ns is not None:
                granted += self.wake()
            for number in list(self.running):
                granted += self.ended(number)
            for worker in self.free:
                if worker in self.free:
                    granted += self.ask(worker)
            owed -= {worker for grant in granted for worker in grant.members}
        assert not owed, f"{owed} wait for ever"


def watched(name: str, options: Mapping[str, Any], seed: int = 0, workers: int = 0) -> Watched:
    made = Watched(generator_of(name, options, HOSTS, seed))
    for worker in range(workers):
        made.join(worker)
    return made


def restored(generator: GroupGenerator, name: str, options: Mapping[str, Any]) -> GroupGenerator:
    """Another one that goes on from its state, by way of JSON."""
    fresh = generator_of(name, options, HOSTS, seed=99)
    fresh.restore(json.loads(json.dumps(generator.state())))
    return fresh
