"""Plays graphs that grow: at every decision, a decider may add operations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from headway.simulation import kernel
from headway.simulation.building import (
    END,
    LEFT,
    NONE,
    SLOTS,
    SPILL,
    START,
    SUCCESSORS,
    WAITS,
    OperationGraph,
    OperationGraphBuilder,
    lines,
)
from headway.simulation.engine import PlayedTimes, first_state, play_on, played_times

NEVER_NS = kernel.NEVER  # the times of operations that were not played


class OperationDecider(Protocol):
    """Takes the decisions of a graph while it is played. It must be deterministic."""

    def decide(self, now_ns: int, reached: Sequence[int]) -> Iterable[int]:
        """Handle the decisions ``reached`` at ``now_ns``, sorted by number.

        Everything else up to ``now_ns`` has happened. Returns the decisions that end now: any of ``reached`` or of
        earlier open ones. Operations that it adds to the graph's builder begin now at the earliest; they may wait for,
        and be waited for by, anything that has not begun. To be called again later, it adds an operation that lasts
        until then, followed by a decision. It must leave open, not raise for, what it cannot decide yet.
        """


class DeadlockError(ValueError):
    """No operation can proceed, but not all are done.

    ``undecided`` maps open decisions to when they were reached (ns); ``waiting`` is the number of unfinished operations.
    """

    def __init__(self, undecided: Mapping[int, int], waiting: int, who: str = "") -> None:
        self.undecided = undecided
        self.waiting = waiting
        since = ", ".join(f"{number} since {since_ns} ns" for number, since_ns in undecided.items())
        super().__init__(f"{waiting} operations wait forever: {who or f'open decisions {since or None}'}")


def play_deciding(
    builder: OperationGraphBuilder, decider: OperationDecider, until_ns: int = NEVER_NS
) -> tuple[OperationGraph, PlayedTimes]:
    """Play the graph of ``builder`` and everything that ``decider`` adds; returns the final graph and its times.

    Operations start as in ``engine.play``. Stops at the first decision at or after ``until_ns``; operations that were
    not reached have the times NEVER_NS. Raises DeadlockError if everything left waits for an open decision or for a
    cycle; OverflowError if times are out of range.
    """
    growing = GrowingGraph(builder)
    state = first_state(growing.graph)
    open_since_ns: dict[int, int] = {}
    while True:
        state = play_on(growing.graph, state)
        if state.counts[kernel.STATUS] != kernel.PAUSED:
            break
        now_ns = int(state.counts[kernel.NOW])
        if now_ns >= until_ns:
            return growing.graph, played_times(growing.graph)
        reached = sorted(state.ready[: state.counts[kernel.DECISIONS]].tolist())
        open_since_ns |= dict.fromkeys(reached, now_ns)
        answered = sorted(set(decider.decide(now_ns, reached)))
        for number in answered:
            assert number in open_since_ns, "no decision that is open"
            del open_since_ns[number]
        state = growing.extended(state, answered)
    if waiting := len(growing.graph) - int(state.counts[kernel.PLAYED]):
        raise DeadlockError(open_since_ns, waiting)
    return growing.graph, played_times(growing.graph)


class GrowingGraph:
    """The graph of a builder, extended by later additions to the builder.

    ``graph`` is its current state. The arrays have room to grow, and played operations keep their rows.
    """

    def __init__(self, builder: OperationGraphBuilder) -> None:
        self._builder = builder
        self.graph = builder.close()
        builder.settle()
        self.graph.wide[:, START : END + 1] = NEVER_NS
        self._wide, self._narrow, self._spilled = self.graph.wide, self.graph.narrow, self.graph.spilled

    def extended(self, state: kernel.PlayState, answered: Sequence[int]) -> kernel.PlayState:
        """End the decisions ``answered`` now and add the new operations; returns the state to continue from."""
        now_ns = int(state.counts[kernel.NOW])
        self.graph.wide[answered, END] = now_ns
        addition = self._builder.addition()
        first, spill = addition.first, len(self.graph.spilled)
        self._make_room(addition.count, addition.spills)
        self.graph.wide[first:, START : END + 1] = NEVER_NS
        addition.fill(self.graph, spill)
        for number in addition.after[addition.after < first].tolist():
            self._wait_for_more(number)
        for before, after in addition.earlier.tolist():
            if self.graph.wide[before, END] <= now_ns:
                continue  # it is done
            self._add_successor(before, after)
            self.graph.narrow[after, WAITS] += 1
            if after < first:
                self._wait_for_more(after)
        self._builder.settle()
        return _answered(_with_queues(state, self.graph.queues), answered)

    def _make_room(self, operations: int, spills: int) -> None:
        """Enlarge ``graph`` by ``operations`` rows and ``spills`` places for successors."""
        before, table = self.graph, self._builder.routes
        count, spilled = len(before) + operations, len(before.spilled) + spills
        if count > len(self._wide):
            self._wide, self._narrow = lines(2 * count)
            self._wide[: len(before)] = before.wide
        if spilled > len(self._spilled):
            self._spilled = np.zeros(2 * spilled, dtype=np.int32)
            self._spilled[: len(before.spilled)] = before.spilled
        routes = before.routes if len(before.routes.queue) == len(table) else table.columns()
        self.graph = OperationGraph(
            self._wide[:count],
            self._narrow[:count],
            self._spilled[:spilled],
            routes,
            before.resources,
            table.queues,
        )

    def _wait_for_more(self, number: int) -> None:
        """Make an earlier operation wait for one more operation."""
        assert self.graph.wide[number, START] == NEVER_NS, "what has begun waits for nothing more"
        self.graph.narrow[number, LEFT] += 1

    def _add_successor(self, before: int, after: int) -> None:
        slots = self.graph.narrow[before, SUCCESSORS : SUCCESSORS + SLOTS]
        free = np.flatnonzero(slots == NONE)
        if len(free):
            slots[free[0]] = after
            return
        more = self.graph.successors(before)[SLOTS:]
        spill = len(self.graph.spilled)
        self._make_room(0, len(more) + 2)
        self.graph.spilled[spill:] = [len(more) + 1, *more, after]
        self.graph.narrow[before, SPILL] = spill


def _with_queues(state: kernel.PlayState, queues: int) -> kernel.PlayState:
    """The state with room for new queues."""
    if (more := queues - len(state.heap)) <= 0:
        return state
    return state._replace(
        flows=np.concatenate((state.flows, np.full((more, kernel.COLUMNS), -1, np.int64))),
        work=np.concatenate((state.work, np.zeros((more, 2)))),
        heap=np.concatenate((state.heap, np.zeros(more, np.int64))),
    )


def _answered(state: kernel.PlayState, answered: Sequence[int]) -> kernel.PlayState:
    """The state after ending the decisions ``answered`` now."""
    counts = state.counts
    for number in answered:
        if counts[kernel.TO_BE_DONE] == len(state.done):
            state = state._replace(done_at=kernel.grow(state.done_at), done=kernel.grow(state.done))
        kernel.push(
            state.done_at, state.done, int(counts[kernel.TO_BE_DONE]), int(counts[kernel.NOW]), number
        )
        counts[kernel.TO_BE_DONE] += 1
    return state
