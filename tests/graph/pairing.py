"""A toy policy of averaging in pairs, its driver in a simulation, and workers that use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.graph.event_loop import Workers
from tests.scheduling.group_schedules import pairs_in_turn

from headway.cluster import Cluster, Host
from headway.collectives.algorithms import ALL_REDUCE, RING
from headway.collectives.selection import Selection
from headway.graph.build import GraphBuilder, RankCursor
from headway.graph.computation import Part
from headway.graph.deciding import Decision, Decisions
from headway.simulation.engine import PlayedTimes

ARRIVED, LEFT = "arrived", "left"


class FirstComePairs:
    """Pairs whoever arrives first with whoever arrives next. It knows ranks and nothing else."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._training = set(ranks)
        self._waiting: int | None = None

    def arrived(self, rank: int) -> tuple[int, ...]:
        """The group that this completes, or none."""
        if self._waiting is None:
            self._waiting = rank
            return ()
        pair, self._waiting = (self._waiting, rank), None
        return pair

    def left(self, rank: int) -> None:
        """A rank has no more steps."""
        self._training.discard(rank)

    def alone(self) -> tuple[int, ...]:
        """The rank that waits and that nobody will come to."""
        if self._waiting is None or self._training != {self._waiting}:
            return ()
        alone, self._waiting = (self._waiting,), None
        return alone


class PairedTraining:
    """Lays workers' steps out, all before or each as its rank comes to it, and drives the policy."""

    def __init__(self, workers: Workers, *, ahead: bool) -> None:
        self.workers, self._ahead = workers, ahead
        self.graph = GraphBuilder(cluster_of(workers), pairs_in_turn(len(workers.compute_ns)))
        self._decisions = Decisions(self.graph)
        self._policy = FirstComePairs(range(len(workers.compute_ns)))
        self._cursors: dict[int, RankCursor] = {}
        self._standing: dict[int, Decision] = {}
        self._groups = 0
        for rank, steps in enumerate(workers.compute_ns):
            cursor = self._cursors[rank] = RankCursor(rank)
            self._lay_out(cursor)
            while ahead and cursor.step < len(steps):
                self._lay_out(cursor)
            if ahead:
                self._lay_out(cursor)

    def _lay_out(self, cursor: RankCursor) -> None:
        """The next step, or that there is none."""
        steps = self.workers.compute_ns[cursor.rank]
        if cursor.step == len(steps):
            self._decisions.ask(cursor, LEFT)
            cursor.step += 1
            return
        if cursor.step > len(steps):
            return
        self.graph.compute(cursor, Part.FORWARD, steps[cursor.step])
        self._decisions.ask(cursor, ARRIVED)
        self.graph.boundary(cursor)
        cursor.step += 1

    def decide(self, now_ns: int, asked: Sequence[Decision]) -> None:
        for each in asked:
            if each.name == LEFT:
                self._policy.left(each.rank)
                self._decisions.answer(each)
        for each in asked:
            if each.name == ARRIVED:
                self._standing[each.rank] = each
                self._average(self._policy.arrived(each.rank))
        self._average(self._policy.alone())

    def _average(self, members: tuple[int, ...]) -> None:
        for rank in members:
            decision = self._standing.pop(rank)
            cursor = self._decisions.cursor_at(decision)
            if len(members) > 1:
                number = self.graph.launch(
                    cursor, ALL_REDUCE, self._groups, self.workers.size_bytes, bucket=-1,
                    selection=Selection(RING, ALL_REDUCE), members=members,
                )  # fmt: skip
                self.graph.wait(cursor, "average", number)
            self._decisions.answer(decision, cursor)
            if not self._ahead:
                self._lay_out(self._cursors[rank])
        self._groups += 1

    def play(self, **options: Any) -> PlayedTimes:
        return self._decisions.play(self, **options)


def cluster_of(workers: Workers) -> Cluster:
    links = zip(workers.up_gbps, workers.down_gbps, strict=True)
    hosts = tuple(
        Host(name=f"host{rank}", workers=1, up_gbps=up, down_gbps=down)
        for rank, (up, down) in enumerate(links)
    )
    return Cluster(hosts=hosts, latency_us=workers.latency_ns / 1e3)


def step_ends_ns(training: PairedTraining, played: PlayedTimes) -> list[list[int]]:
    """When each rank ended each of its steps."""
    return [
        [int(played.end_ns[training.graph.boundaries[step][rank]]) for step in range(len(steps))]
        for rank, steps in enumerate(training.workers.compute_ns)
    ]
