"""Simulates partial all-reduce: the generator that serves live jobs forms groups while the simulation runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from headway.cluster import Cluster
from headway.collectives.algorithms import ALL_REDUCE
from headway.collectives.selection import Selection, native
from headway.errors import UnsupportedError
from headway.graph.build import GraphBuilder, RankCursor
from headway.graph.computation import Part, Point, Timeline
from headway.graph.deciding import NO_RANK, Decision, Decisions
from headway.incidents import Incidents
from headway.scheduling.groups import CoordinatedGroups, GroupSchedule
from headway.strategies.chance import jittered, slowed
from headway.strategies.horizon import GroupRun, Outcome
from headway.strategies.partial_all_reduce.generators.attendance import Attendance, State
from headway.strategies.partial_all_reduce.generators.generator import (
    GeneratorOptions,
    Grant,
    GroupGenerator,
    Worker,
)
from headway.strategies.partial_all_reduce.generators.rules import generator_of
from headway.strategies.partial_all_reduce.matrices import Consensus, iterations_to_mix


@dataclass(frozen=True)
class Scenario:
    """Time span and random events of a simulation. Times are nanoseconds from the start.

    The time before ``from_ns`` is a warm-up, and the simulation ends at ``until_ns``. ``deaths`` and ``joins`` are
    (time, rank): a rank whose first event is a join is absent at first; ranks may rejoin after dying. With probability
    ``slow_share`` an iteration takes ``slow_factor`` times as long, and each varies by a share of up to ``jitter``.
    """

    until_ns: int
    from_ns: int = 0
    deaths: Sequence[tuple[int, int]] = ()
    joins: Sequence[tuple[int, int]] = ()
    slow_share: float = 0.0
    slow_factor: float = 1.0
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.from_ns < self.until_ns:
            raise ValueError(f"expected 0 <= from_ns < until_ns, got {self.from_ns} and {self.until_ns}")
        if any(time_ns < 1 for time_ns, _ in (*self.deaths, *self.joins)):
            raise ValueError("deaths and joins must be after the start")
        if (rank := self._incidents.twice()) is not None:
            raise ValueError(f"rank {rank} dies or joins twice in a row")

    @property
    def _incidents(self) -> Incidents:
        return Incidents(deaths=tuple(self.deaths), joins=tuple(self.joins))

    def absent_first(self, rank: int) -> bool:
        """Whether a rank is absent at the start, because its first event is a join."""
        happens = self._incidents.of(rank)
        return bool(happens) and happens[0][1]

    def factor(self, rank: int, iteration: int) -> float:
        """Return the slowdown of an iteration of a rank."""
        slow = slowed(self.slow_share, self.slow_factor, self.seed, rank, iteration)
        return slow * jittered(self.jitter, self.seed, rank, iteration)


@dataclass(frozen=True)
class Iterations:
    """Computation of each rank: its steps, repeated in order.

    ``steps[rank][position]`` are the parts of a step and their times (ns), without communication.
    """

    steps: Sequence[Sequence[Sequence[tuple[str, int]]]]
    scenario: Scenario
    factors: Mapping[int, float] = field(default_factory=dict)  # additional slowdown by rank

    def of(self, rank: int, iteration: int) -> Sequence[tuple[str, int]]:
        """Return the parts of an iteration and their times (ns), in order."""
        steps = self.steps[rank]
        factor = self.scenario.factor(rank, iteration) * self.factors.get(rank, 1.0)
        return [(part, round(time_ns * factor)) for part, time_ns in steps[iteration % len(steps)]]


def parts_of(timeline: Timeline) -> tuple[tuple[str, int], ...]:
    """Return the computation of a step that communicates only at its end.

    Collectives of the recorded strategy and the work on their results are dropped. So are the script's own collectives,
    such as averaging a loss, which would synchronise all ranks in every step.
    """
    parts: list[tuple[str, int]] = []
    optimizer_ns = timeline.optimizer_ns
    for item in timeline.items:
        if item.kind == Point.STEP:
            kind, time_ns, optimizer_ns = Part.OPTIMIZER, optimizer_ns, 0
        elif item.kind in (Part.OPTIMIZER, Part.FINALIZE):
            continue
        else:
            kind, time_ns = item.kind, item.duration_ns
        if time_ns <= 0:
            continue
        if parts and parts[-1][0] == kind:
            parts[-1] = (kind, parts[-1][1] + time_ns)
        else:
            parts.append((kind, time_ns))
    return tuple(parts) or ((Part.REST, 1),)


class ScheduledState(State):
    """State of ``ScheduledGroups``: the last round that each worker asked for, -1 for none."""

    rounds: tuple[int, ...]


class ScheduledGroups(Attendance[GeneratorOptions]):
    """Generator that follows a ``GroupSchedule``; workers cannot leave.

    Live ranks know the schedule and need no coordinator.
    """

    name: ClassVar[str] = "static"
    state_class: ClassVar[type[State]] = ScheduledState

    def __init__(self, schedule: GroupSchedule, hosts: Mapping[Worker, str]) -> None:
        super().__init__(GeneratorOptions(), hosts, 0)
        self._schedule = schedule
        self._rounds = [-1] * schedule.world_size

    def _on_ask(self, worker: Worker, now_ns: int) -> None:
        self._rounds[worker] += 1

    def _drawn_now(self, now_ns: int) -> Iterator[Sequence[Worker]]:
        del now_ns
        for worker in sorted(self.waiting):
            if worker not in self.waiting:
                continue
            round_ = self._rounds[worker]
            group = self._schedule.group_of(worker, round_) or (worker,)
            if all(self._is_ready(member) and self._rounds[member] == round_ for member in group):
                yield group

    def _snapshot(self) -> dict[str, Any]:
        return {**super()._snapshot(), "rounds": tuple(self._rounds)}

    def _take(self, state: Any) -> None:
        super()._take(state)
        self._rounds = list(state.rounds)


ASKS, IS_DONE, WAKES, HAPPENS = "asks", "group is done", "wakes", "happens"


def generator_for(schedule: GroupSchedule | CoordinatedGroups, cluster: Cluster) -> GroupGenerator:
    """Return the generator of the live coordinator, or one that follows a fixed schedule."""
    hosts = {rank: cluster.hosts[host].name for rank, host in enumerate(cluster.host_of_rank)}
    if isinstance(schedule, GroupSchedule):
        return ScheduledGroups(schedule, hosts)
    return generator_of(schedule.generator, dict(schedule.options), hosts, schedule.seed)


@dataclass(slots=True)
class _Rank:
    """State of a rank. ``life`` counts joins and deaths; ``finished`` counts iterations over all lives."""

    life: int = 0
    is_there: bool = False
    finished: int = 0
    cursor: RankCursor | None = None  # lays out what comes next
    stands: Decision | None = None  # where its main thread waits
    since_ns: int = 0  # since the end of its iteration
    request: Decision | None = None  # where it asked for its current group
    request_ns: int = 0
    has_mean: bool = False  # not yet broadcast to the ranks of its host


@dataclass(slots=True)
class _Group:
    members: tuple[int, ...]
    iterations: tuple[int, ...]
    begin_ns: int
    lives: dict[int, int]
    done: dict[int, Decision] = field(default_factory=dict)
    averaged: bool = True


class CoSimulation:
    """Lays out iterations and groups as they occur: the ``Decider`` of one simulation, to be played once.

    A rank computes an iteration and asks for a group. With ``staleness`` 0 it waits until the group has averaged; with
    1 it computes the next iteration meanwhile and waits before asking again. A group all-reduces ``size_bytes`` and ends
    when all members have finished and voted. Asking, granting and voting take one message between hosts each, unless the
    schedule is fixed. If a member dies, its group ends at the same time but discards the mean. Joining ranks receive
    the model instantly.

    If hosts are the workers, ``cluster`` has one rank per host. A host that has applied a mean waits ``hand_down_ns``
    while it broadcasts to its other ranks: before continuing, or with ``staleness`` 1 before asking again.
    """

    def __init__(
        self,
        cluster: Cluster,
        schedule: GroupSchedule | CoordinatedGroups,
        iterations: Iterations,
        size_bytes: int,
        staleness: int,
        generator: GroupGenerator | None = None,
        hand_down_ns: Sequence[int] = (),
    ) -> None:
        if isinstance(schedule, GroupSchedule) and (iterations.scenario.deaths or iterations.scenario.joins):
            raise UnsupportedError(
                "static groups cannot continue when ranks die or join", got="deaths or joins",
                fix="Use a generator, such as groups=first-come.",
            )  # fmt: skip
        self._iterations, self._size_bytes, self._staleness = iterations, size_bytes, staleness
        self._hand_down_ns = hand_down_ns or [0] * cluster.world_size
        self._generator = generator or generator_for(schedule, cluster)
        self.graph: GraphBuilder[GroupSchedule | CoordinatedGroups] = GraphBuilder(cluster, schedule)
        self._decisions = Decisions(self.graph)
        coordinated = isinstance(schedule, CoordinatedGroups)
        self._message_ns = round(cluster.latency_us * 1e3) if coordinated else 0
        self._ranks = [_Rank() for _ in range(cluster.world_size)]
        self._groups: dict[int, _Group] = {}
        self._group_of: dict[int, int] = {}  # by the operations of decisions
        self._lives: dict[int, int] = {}  # of the decisions of ranks, by operation
        self._happens: dict[int, tuple[Callable[[int, int, int], None], int]] = {}  # by timer
        self._wake_at_ns: int | None = None
        self.consensus = Consensus(cluster.world_size)
        self.finished_ns: list[list[int]] = [[] for _ in self._ranks]
        self.runs: list[GroupRun] = []
        self._standing_ns, self._forming_ns = [0] * len(self._ranks), [0] * len(self._ranks)
        self._spreads: list[float] = []

    @property
    def _scenario(self) -> Scenario:
        return self._iterations.scenario

    def play(self) -> Outcome:
        """Simulate until the scenario's end. Raises OverflowError where times are out of range."""
        scenario = self._scenario
        self._at(scenario.until_ns, lambda *_: None, NO_RANK)
        for time_ns, rank in scenario.deaths:
            self._at(time_ns, self._die, rank)
        for time_ns, rank in scenario.joins:
            self._at(time_ns, self._join, rank)
        for rank in range(len(self._ranks)):
            if not scenario.absent_first(rank):
                self._join(rank, 0, -1)
        played = self._decisions.play(self, scenario.until_ns)
        for rank, state in enumerate(self._ranks):
            if state.stands is not None:
                self._stood(rank, scenario.until_ns)
        selections = {collective.selection for collective in self.graph.collectives}
        return Outcome(
            from_ns=scenario.from_ns,
            until_ns=scenario.until_ns,
            finished_ns=self.finished_ns,
            groups=self.runs,
            standing_ns=self._standing_ns,
            forming_ns=self._forming_ns,
            distance=self.consensus.distance(self._present),
            spread=self.consensus.spread(self._present),
            mean_spread=sum(self._spreads) / len(self._spreads) if self._spreads else math.nan,
            operations=len(played.end_ns),
            mixing_iterations=iterations_to_mix(
                [run.members for run in self.runs if run.averaged], len(self._ranks)
            ),
            cost_error=max(
                (selection.cost(self.graph.cluster).fit_error for selection in selections), default=0.0
            ),
        )

    def selection(self, members: Sequence[int]) -> Selection:
        """Return the all-reduce of a group: over Gloo connections, whatever the library of the job."""
        return native(ALL_REDUCE, self._size_bytes, len(members))

    # The decider.

    def decide(self, now_ns: int, decisions: Sequence[Decision]) -> None:
        """Pass events to the generator and start the groups that it grants."""
        for decision in decisions:
            if decision.name == IS_DONE:
                self._member_is_done(decision, now_ns)
        for decision in decisions:
            if decision.name == ASKS and self._lives[decision.operation] == self._ranks[decision.rank].life:
                self._computed(decision, now_ns)
        for decision in decisions:
            if decision.name == HAPPENS:
                happen, rank = self._happens[decision.operation]
                happen(rank, now_ns, decision.operation)
        if (wake_ns := self._generator.wake_ns) is not None and wake_ns <= now_ns:
            self._begin(self._generator.wake(now_ns), now_ns)
        self._set_alarm(now_ns)

    def _set_alarm(self, now_ns: int) -> None:
        wake_ns = self._generator.wake_ns
        if wake_ns is not None and (self._wake_at_ns is None or not now_ns < self._wake_at_ns <= wake_ns):
            self._wake_at_ns = max(wake_ns, now_ns + 1)
            self._decisions.ask_in(self._wake_at_ns - now_ns, WAKES)

    def _at(self, time_ns: int, happen: Callable[[int, int, int], None], rank: int) -> None:
        self._happens[self._decisions.ask_in(time_ns, HAPPENS).operation] = happen, rank

    # Ranks.

    def _join(self, rank: int, now_ns: int, operation: int) -> None:
        state = self._ranks[rank]
        assert not state.is_there, "a rank joins that is there"
        source = next((peer for peer, peer_state in enumerate(self._ranks) if peer_state.is_there), None)
        if source is not None and now_ns:
            self.consensus.copied(rank, source)
        self._ranks[rank] = _Rank(state.life + 1, True, state.finished)
        self._ranks[rank].cursor = RankCursor(rank, state.finished, operation)
        grants = self._generator.join(rank, now_ns)
        self._lay_out_iteration(rank)
        self._begin(grants, now_ns)

    def _die(self, rank: int, now_ns: int, _operation: int) -> None:
        state = self._ranks[rank]
        if not state.is_there:
            return
        if state.stands is not None:
            self._stood(rank, now_ns)
        for group in self._groups.values():
            group.averaged &= group.lives.get(rank) != state.life
        self._ranks[rank] = _Rank(state.life + 1, False, state.finished)
        self._begin(self._generator.leave(rank, now_ns), now_ns)

    def _lay_out_iteration(self, rank: int) -> None:
        state = self._ranks[rank]
        assert state.cursor is not None
        for part, time_ns in self._iterations.of(rank, state.finished):
            self.graph.compute(state.cursor, part, time_ns)
        decision = self._decisions.ask(state.cursor, ASKS)
        self._lives[decision.operation] = state.life
        state.cursor.step += 1

    def _computed(self, decision: Decision, now_ns: int) -> None:
        """A rank has computed an iteration."""
        rank, state = decision.rank, self._ranks[decision.rank]
        self.finished_ns[rank].append(now_ns)
        self.consensus.iterated(rank)
        state.finished += 1
        state.stands, state.since_ns = decision, now_ns
        if state.request is None:
            self._handed_down(rank, now_ns, self._ask)

    def _handed_down(self, rank: int, now_ns: int, then: Callable[[int, int], None]) -> None:
        """Call ``then`` after a host has broadcast a new mean to its ranks."""
        state = self._ranks[rank]
        taken_ns = self._hand_down_ns[rank] if state.has_mean else 0
        state.has_mean = False
        if not taken_ns:
            then(rank, now_ns)
            return

        def happen(rank: int, now_ns: int, _operation: int) -> None:
            if self._ranks[rank].life == state.life:
                then(rank, now_ns)

        self._at(taken_ns, happen, rank)

    def _ask(self, rank: int, now_ns: int) -> None:
        state = self._ranks[rank]
        state.request, state.request_ns = state.stands, now_ns
        if self._staleness:
            self._go_on(rank, now_ns)
        self._begin(self._generator.ask(rank, now_ns), now_ns)

    def _go_on(self, rank: int, now_ns: int) -> None:
        """Have a rank compute its next iteration."""
        state = self._ranks[rank]
        assert state.stands is not None
        self._stood(rank, now_ns)
        self._decisions.answer(state.stands)
        state.stands = None
        self._lay_out_iteration(rank)

    def _stood(self, rank: int, now_ns: int) -> None:
        since_ns = max(self._ranks[rank].since_ns, self._scenario.from_ns)
        self._standing_ns[rank] += max(0, now_ns - since_ns)

    def _released(self, rank: int, now_ns: int) -> None:
        """Continue after the end of a rank's group, or ask for the next group if the rank waits to."""
        state = self._ranks[rank]
        state.request = None
        if state.stands is None:
            return
        self._handed_down(rank, now_ns, self._ask if self._staleness else self._go_on)

    # Groups.

    def _begin(self, grants: Iterable[Grant], now_ns: int) -> None:
        for grant in grants:
            for rank in grant.members:
                begun_ns = max(self._scenario.from_ns, self._ranks[rank].request_ns)
                self._forming_ns[rank] += max(0, now_ns - begun_ns)
            if len(grant.members) == 1:
                self._released(grant.members[0], now_ns)
                continue
            members = [self._ranks[rank] for rank in grant.members]
            self._groups[grant.number] = _Group(
                grant.members,
                tuple(state.finished for state in members),
                now_ns,
                {rank: member.life for rank, member in zip(grant.members, members, strict=True)},
            )
            for rank in grant.members:
                self._average(rank, grant)

    def _average(self, rank: int, grant: Grant) -> None:
        """Lay out a member's part of a group, on its main thread or beside it."""
        state = self._ranks[rank]
        assert state.request is not None
        assert state.cursor is not None
        if self._staleness:
            cursor = RankCursor(rank, state.request.step, state.request.operation)
        else:
            self._decisions.answer(state.request)
            cursor = state.cursor
        self._delay(cursor, 2 * self._message_ns)  # to ask, and to be granted
        number = self.graph.launch(
            cursor, ALL_REDUCE, grant.number, self._size_bytes, bucket=-1, members=grant.members,
            selection=self.selection(grant.members),
        )  # fmt: skip
        self.graph.wait(cursor, "group", number)
        self._delay(cursor, 2 * self._message_ns)  # to vote, and to learn what was decided
        decision = self._decisions.ask(cursor, IS_DONE)
        self._group_of[decision.operation] = grant.number
        if not self._staleness:
            state.stands = decision

    def _delay(self, cursor: RankCursor, time_ns: int) -> None:
        """Add a delay after everything that the cursor waits for."""
        if time_ns:
            ends = [self.graph.communications[number].end_of(cursor.rank) for number in cursor.pending]
            cursor.pending.clear()
            cursor.tail = self.graph.operations.operation(time_ns, after=[cursor.tail, *ends])

    def _member_is_done(self, decision: Decision, now_ns: int) -> None:
        """A member has finished; the last one ends the group for all."""
        number = self._group_of.pop(decision.operation)
        group = self._groups[number]
        group.done[decision.rank] = decision
        if len(group.done) < len(group.members):
            return
        del self._groups[number]
        if group.averaged:
            self.consensus.averaged(group.members)
        self.runs.append(
            GroupRun(number, group.members, group.iterations, group.begin_ns, now_ns, group.averaged)
        )
        if now_ns > self._scenario.from_ns and len(self.runs) % max(1, len(self._ranks) // 8) == 0:
            self._spreads.append(self.consensus.spread(self._present))
        self._begin(self._generator.ended(number, now_ns), now_ns)
        for rank in group.members:
            if self._staleness:
                self._decisions.answer(group.done[rank])
            if self._ranks[rank].life == group.lives[rank]:
                self._ranks[rank].has_mean = group.averaged
                self._released(rank, now_ns)

    @property
    def _present(self) -> list[int]:
        return [rank for rank, state in enumerate(self._ranks) if state.is_there]
