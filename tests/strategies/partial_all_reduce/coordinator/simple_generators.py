"""Generators of groups for tests of the coordinator: all at once, and random pairs of whoever waits."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from headway.strategies.partial_all_reduce.generators.generator import Grant, GroupGenerator


class _Simple(GroupGenerator):
    """Keeps who is there, waits and runs."""

    def __init__(self) -> None:
        self._there: set[int] = set()
        self._waiting: list[int] = []
        self._running: dict[int, tuple[int, ...]] = {}
        self._next = 0

    def join(self, worker: int, now_ns: int) -> Sequence[Grant]:
        if worker in self._there:
            raise ValueError(f"worker {worker} is there already")
        if any(worker in members for members in self._running.values()):
            raise ValueError(f"a group of worker {worker} runs")
        self._there.add(worker)
        return ()

    def leave(self, worker: int, now_ns: int) -> Sequence[Grant]:
        self._there.discard(worker)
        if worker in self._waiting:
            self._waiting.remove(worker)
        return self._granted()

    def ask(self, worker: int, now_ns: int) -> Sequence[Grant]:
        busy = any(worker in members for members in self._running.values())
        if worker not in self._there or worker in self._waiting or busy:
            raise ValueError(f"worker {worker} is not free")
        self._waiting.append(worker)
        return self._granted()

    def ended(self, number: int, now_ns: int) -> Sequence[Grant]:
        del self._running[number]
        return self._granted()

    def _granted(self) -> Sequence[Grant]:
        raise NotImplementedError

    def _grant(self, members: Sequence[int]) -> Grant:
        grant = Grant(self._next, tuple(sorted(members)))
        self._next += 1
        self._waiting = [worker for worker in self._waiting if worker not in members]
        if len(members) > 1:
            self._running[grant.number] = grant.members
        return grant

    def state(self) -> Mapping[str, Any]:
        return {
            "there": sorted(self._there),
            "waiting": self._waiting,
            "running": [[number, *members] for number, members in self._running.items()],
            "next": self._next,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._there = set(state["there"])
        self._waiting = list(state["waiting"])
        self._running = {number: tuple(members) for number, *members in state["running"]}
        self._next = state["next"]


class All(_Simple):
    """Everybody who is there, once all of them wait."""

    def _granted(self) -> Sequence[Grant]:
        if self._there and set(self._waiting) == self._there:
            return [self._grant(self._waiting)]
        return ()


class Pairs(_Simple):
    """Two of those who wait, drawn by a seed; whoever is alone goes on alone."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._seed = seed

    def _granted(self) -> Sequence[Grant]:
        granted = []
        while len(self._waiting) > 1:
            drawn = random.Random(f"{self._seed} {self._next}").sample(sorted(self._waiting), 2)
            granted.append(self._grant(drawn))
        if self._waiting and self._there == set(self._waiting):
            granted.append(self._grant(self._waiting))
        return granted
