"""Plays steps with decisions: ranks stop at decision points, and a decider lays out what they do next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headway.graph.build import GraphBuilder, RankCursor
from headway.simulation.deciding import NEVER_NS, DeadlockError, play_deciding
from headway.simulation.engine import PlayedTimes

NO_RANK = -1  # the rank of timers


@dataclass(frozen=True, slots=True)
class Decision:
    """A point at which a rank waits for an answer, or the end of a timer (NO_RANK).

    The rank waits at ``operation`` and continues after ``resume``.
    """

    rank: int
    step: int
    name: str
    operation: int
    resume: int


class Decider(Protocol):
    """Decides what ranks do at decision points: drives a pure policy in a simulation.

    The policy (which workers average next, whom to wait for) knows nothing of graphs; the live service asks the same
    object. The decider asks it and lays its answer out.
    """

    def decide(self, now_ns: int, reached: Sequence[Decision]) -> None:
        """Handle the decisions ``reached`` at ``now_ns``: all of that moment, in rank order, timers last.

        Everything else up to ``now_ns`` has happened. With cursors at decisions (``Decisions.cursor_at``) it may launch
        collectives, transfers and computation, which begin now at the earliest; with ``Decisions.answer`` it lets ranks
        continue, also those of earlier decisions. Unanswered decisions stay open. It must be deterministic: no clock,
        and random numbers only from a seed.
        """


class Decisions:
    """Adds decisions to a graph and plays it.

    A graph may be complete before it is played, or grow: a decider may lay out a rank's next step with the cursor that
    continues after the decision. Such graphs are never folded and ignore slowdown by communication; ``engine.play``
    refuses them.
    """

    def __init__(self, graph: GraphBuilder[Any]) -> None:
        assert graph.ranks == graph.world_size, "folded ranks decide nothing"
        self._graph = graph
        self._by_operation: dict[int, Decision] = {}
        self._answered: list[int] = []

    def ask(self, cursor: RankCursor, name: str = "") -> Decision:
        """Stop a rank, after everything that it has to wait for, until the decider answers.

        ``cursor`` continues after the decision.
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
        """Set a timer: call the decider ``delay_ns`` (at least 1) from now, or from time 0 before playing.

        It fires even if what it was set for has already happened. Timers need no answer.
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
        """A cursor at a decision, to lay out what its rank does before it continues."""
        assert decision.rank != NO_RANK, "a timer does nothing"
        return RankCursor(decision.rank, decision.step, decision.operation)

    def answer(self, decision: Decision, cursor: RankCursor | None = None) -> None:
        """End a decision now. Its rank continues at once, or after the work and waits of ``cursor``."""
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
        """Play the graph and everything that ``decider`` adds to it.

        Stops at the first decision at or after ``until_ns``; operations that were not reached have the times NEVER_NS.
        Raises DeadlockError, which names the waiting ranks and since when; UserError if a member of a collective or
        transfer did not launch it within one decision; OverflowError if times are out of range.
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
            f"the decider lets no rank continue: {ranks}"
            if standing
            else "operations wait for each other: a cycle"
        )

    def reached(self, operations: Sequence[int]) -> list[Decision]:
        """The decisions of these operations in rank order, timers last."""
        decisions = [self._by_operation[number] for number in operations]
        return sorted(
            decisions, key=lambda decision: (decision.rank == NO_RANK, decision.rank, decision.operation)
        )

    def take_answered(self) -> list[int]:
        """The operations answered since the last call."""
        answered, self._answered = self._answered, []
        return answered


class _Driver:
    """Calls a decider for the engine."""

    def __init__(self, decisions: Decisions, graph: GraphBuilder[Any], decider: Decider) -> None:
        self._decisions, self._graph, self._decider = decisions, graph, decider

    def decide(self, now_ns: int, operations: Sequence[int]) -> list[int]:
        reached = self._decisions.reached(operations)
        self._decider.decide(now_ns, reached)
        self._graph.expand()
        timers = [decision.operation for decision in reached if decision.rank == NO_RANK]
        return [*self._decisions.take_answered(), *timers]
