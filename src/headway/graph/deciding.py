"""Steps that are decided about while they are played: ranks come to decisions, and a decider says what they do then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headway.graph.build import GraphBuilder, RankCursor
from headway.simulation.deciding import NEVER_NS, DeadlockError, play_deciding
from headway.simulation.engine import PlayedTimes

NO_RANK = -1  # whom timers belong to


@dataclass(frozen=True, slots=True)
class Decision:
    """A point at which a rank stands still until it is answered, or one that a timer comes to (NO_RANK).

    It stands at ``operation`` and goes on behind ``resume``.
    """

    rank: int
    step: int
    name: str
    operation: int
    resume: int


class Decider(Protocol):
    """Says what ranks do that have come to decisions: the driver of a pure policy in a simulation.

    The policy itself (which workers average together next, whom to wait for) knows nothing of graphs: it is told who
    has come when, and the same object is asked by the live service. This one asks it, and lays its answer out.
    """

    def decide(self, now_ns: int, reached: Sequence[Decision]) -> None:
        """Answer at the time ``now_ns``, when ``reached`` are reached: those of a moment together, in order of ranks.

        Timers come last. Whatever else happens until ``now_ns`` has happened. With cursors that stand at decisions
        (``Decisions.cursor_at``) it asks for collectives of subsets, transfers and computation in the graph, which
        begin now at the earliest; with ``Decisions.answer`` it lets ranks go on, those of ``reached`` or of earlier
        moments. What it does not answer stays open. It must answer the same to the same: no clock, no chance but from
        a seed.
        """


class Decisions:
    """The decisions of one graph, and its play.

    A graph may be laid out to its end before it is played, or grow: a decider may lay out the next step of a rank
    when it answers, with the cursor that goes on behind the decision. Graphs with decisions have all ranks, are never
    folded, and are played without slowing computation down; ``engine.play`` refuses them.
    """

    def __init__(self, graph: GraphBuilder[Any]) -> None:
        assert graph.ranks == graph.world_size, "folded ranks decide nothing"
        self._graph = graph
        self._by_operation: dict[int, Decision] = {}
        self._answered: list[int] = []

    def ask(self, cursor: RankCursor, name: str = "") -> Decision:
        """Have a rank stand still, after all that it has to wait for, until the decider answers.

        ``cursor`` goes on behind it.
        """
        communications = self._graph.communications
        before = [cursor.tail] if cursor.tail >= 0 else []
        before += [communications[number].end_of(cursor.rank) for number in cursor.pending]
        cursor.pending.clear()
        cursor.wait_name = ""
        decision = self._add(cursor.rank, cursor.step, name, before)
        cursor.tail = decision.resume
        return decision

    def ask_in(self, delay_ns: int, name: str = "") -> Decision:
        """Have the decider asked ``delay_ns`` (at least 1) from now: from time 0 where nothing is played yet.

        It is asked even if all that it wanted to wait for has come by then. Timers need no answer.
        """
        assert delay_ns > 0, "a timer without a delay would let no time pass"
        return self._add(NO_RANK, -1, name, [self._graph.operations.operation(delay_ns)])

    def _add(self, rank: int, step: int, name: str, after: Sequence[int]) -> Decision:
        operations = self._graph.operations
        number = operations.decision(after)
        resume = operations.operation(after=[number]) if rank != NO_RANK else number
        decision = self._by_operation[number] = Decision(rank, step, name, number, resume)
        return decision

    def cursor_at(self, decision: Decision) -> RankCursor:
        """A cursor that stands at a decision, for what its rank is to do before it goes on."""
        assert decision.rank != NO_RANK, "a timer does nothing"
        return RankCursor(decision.rank, decision.step, decision.operation)

    def answer(self, decision: Decision, cursor: RankCursor | None = None) -> None:
        """End a decision now. Its rank goes on at once, or after all that ``cursor`` has done and is to wait for."""
        assert decision.rank != NO_RANK, "timers need no answer"
        self._answered.append(decision.operation)
        if cursor is None:
            return
        assert cursor.rank == decision.rank, "a cursor of another rank"
        edge = self._graph.operations.edge
        if cursor.tail != decision.operation:
            edge(cursor.tail, decision.resume)
        for number in cursor.pending:
            edge(self._graph.communications[number].end_of(cursor.rank), decision.resume)

    def play(self, decider: Decider, until_ns: int = NEVER_NS) -> PlayedTimes:
        """Play the graph and what ``decider`` adds to it.

        From the first decision at or after ``until_ns`` on nothing more is played; what was not reached has the times
        NEVER_NS. Raises DeadlockError, which names the ranks that nobody lets go on and since when they stand;
        ValueError where a collective or transfer was not asked for by all of its members, within one decision;
        OverflowError where times are out of range.
        """
        self._graph.expand()
        try:
            _, played = play_deciding(self._graph.operations, _Driver(self, self._graph, decider), until_ns)
        except DeadlockError as deadlock:
            raise DeadlockError(deadlock.undecided, deadlock.waiting, self._who_stands(deadlock)) from None
        return played

    def _who_stands(self, deadlock: DeadlockError) -> str:
        standing = [(self._by_operation[number], since_ns) for number, since_ns in deadlock.undecided.items()]
        ranks = ", ".join(
            f"rank {d.rank} since {since_ns} ns (step {d.step}{f', {d.name}' if d.name else ''})"
            for d, since_ns in sorted(standing, key=lambda pair: pair[0].rank)
        )
        return (
            f"the decider lets nobody go on: {ranks}"
            if standing
            else "operations wait for each other: a cycle"
        )

    def reached(self, operations: Sequence[int]) -> list[Decision]:
        """The decisions of these operations, by ranks, timers last."""
        decisions = [self._by_operation[number] for number in operations]
        return sorted(
            decisions, key=lambda decision: (decision.rank == NO_RANK, decision.rank, decision.operation)
        )

    def take_answered(self) -> list[int]:
        """What was answered since this was asked."""
        answered, self._answered = self._answered, []
        return answered


class _Driver:
    """Asks a decider for the engine."""

    def __init__(self, decisions: Decisions, graph: GraphBuilder[Any], decider: Decider) -> None:
        self._decisions, self._graph, self._decider = decisions, graph, decider

    def decide(self, now_ns: int, operations: Sequence[int]) -> list[int]:
        reached = self._decisions.reached(operations)
        self._decider.decide(now_ns, reached)
        self._graph.expand()
        timers = [decision.operation for decision in reached if decision.rank == NO_RANK]
        return [*self._decisions.take_answered(), *timers]
