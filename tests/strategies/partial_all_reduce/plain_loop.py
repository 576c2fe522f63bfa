"""Decentralised training as a plain event loop: what the co-simulation is held against. Of Headway only a generator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

COMPUTED, DONE = "computed", "done"


@dataclass
class Job:
    """``compute_ns(rank, iteration)`` says how long iterations take, ``average_ns(members)`` groups."""

    ranks: int
    until_ns: int
    generator: Any
    compute_ns: Callable[[int, int], int]
    average_ns: Callable[[tuple[int, ...]], int]
    message_ns: int
    staleness: int
    deaths: Sequence[tuple[int, int]] = ()
    joins: Sequence[tuple[int, int]] = ()
    absent: frozenset[int] = frozenset()

    finished: list[list[int]] = field(default_factory=list)
    groups: list[tuple[int, tuple[int, ...], int, int, bool]] = field(default_factory=list)

    def run(self) -> None:
        n = self.ranks
        self.finished = [[] for _ in range(n)]
        self._life = [0] * n
        self._there = [False] * n
        self._open = [False] * n  # whether it has asked, and its group is not over
        self._idle = [False] * n  # whether it has computed and stands
        self._events: list[tuple[int, str, int, Any]] = []
        for rank in range(n):
            if rank not in self.absent:
                self._join(rank, 0)
        while True:
            wake = self.generator.wake_ns
            times = [event[0] for event in self._events]
            times += [t for t, _ in (*self.deaths, *self.joins) if t > self._now]
            times += [max(wake, self._now + 1)] if wake is not None else []
            now = min(times, default=self.until_ns)
            if now >= self.until_ns:
                return
            self._moment(now)

    _now = 0

    def _moment(self, now: int) -> None:
        self._now = now
        due = [event for event in self._events if event[0] == now]
        self._events = [event for event in self._events if event[0] != now]
        for _, kind, _, what in sorted((e for e in due if e[1] == DONE), key=lambda e: e[2]):
            assert kind == DONE
            number, members, lives, begin = what
            alive = [rank for rank, life in zip(members, lives, strict=True) if life == self._life[rank]]
            self.groups.append((number, members, begin, now, len(alive) == len(members)))
            self._begin(self.generator.ended(number, now), now)
            for rank in members:
                if rank in alive:
                    self._over(rank, now)
        for _, _, rank, life in sorted((e for e in due if e[1] == COMPUTED), key=lambda e: e[2]):
            if life == self._life[rank]:
                self.finished[rank].append(now)
                self._idle[rank] = True
                if not self._open[rank]:
                    self._ask(rank, now)
        for time, rank in self.deaths:
            if time == now:
                self._life[rank] += 1
                self._there[rank] = self._open[rank] = self._idle[rank] = False
                self._begin(self.generator.leave(rank, now), now)
        for time, rank in self.joins:
            if time == now:
                self._join(rank, now)
        if self.generator.wake_ns is not None and self.generator.wake_ns <= now:
            self._begin(self.generator.wake(now), now)

    def _join(self, rank: int, now: int) -> None:
        self._life[rank] += 1
        self._there[rank] = True
        self._open[rank] = self._idle[rank] = False
        grants = self.generator.join(rank, now)
        self._compute(rank, now)
        self._begin(grants, now)

    def _compute(self, rank: int, now: int) -> None:
        self._idle[rank] = False
        ends = now + self.compute_ns(rank, len(self.finished[rank]))
        self._events.append((ends, COMPUTED, rank, self._life[rank]))

    def _ask(self, rank: int, now: int) -> None:
        self._open[rank] = True
        if self.staleness:
            self._compute(rank, now)
        self._begin(self.generator.ask(rank, now), now)

    def _over(self, rank: int, now: int) -> None:
        self._open[rank] = False
        if not self._idle[rank]:
            return
        if self.staleness:
            self._ask(rank, now)
        else:
            self._compute(rank, now)

    def _begin(self, grants: Sequence[Any], now: int) -> None:
        for number, members in grants:
            if len(members) == 1:
                self._over(members[0], now)
                continue
            ends = now + 4 * self.message_ns + self.average_ns(members)
            lives = tuple(self._life[rank] for rank in members)
            self._events.append((ends, DONE, max(members), (number, members, lives, now)))
