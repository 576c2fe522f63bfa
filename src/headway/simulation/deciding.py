"""A graph that grows while it is played: at its decisions somebody is asked what comes next."""

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

NEVER_NS = kernel.NEVER  # when what was not played began and ended


class OperationDecider(Protocol):
    """Takes the decisions of a graph while it is played. The same moments give the same answers: it must be pure."""

    def decide(self, now_ns: int, reached: Sequence[int]) -> Iterable[int]:
        """Answer at the time ``now_ns``, when the decisions ``reached`` are reached, in the order of their numbers.

        Everything else that happens until ``now_ns`` has happened. Returns the decisions that end now: any of
        ``reached``, and of earlier ones that were left open. What it adds to the builder of the graph begins now at the
        earliest; it may wait for, and be waited for by, anything that has not begun. To be asked again later it adds
        an operation that lasts until then, and a decision behind that. It must not raise for what it cannot decide
        yet, but leave it open.
        """


class DeadlockError(ValueError):
    """Nothing happens any more, and not all is done.

    ``undecided`` are the decisions left open, and since when (ns); ``waiting`` is how many operations are not done.
    """

    def __init__(self, undecided: Mapping[int, int], waiting: int, who: str = "") -> None:
        self.undecided = undecided
        self.waiting = waiting
        since = ", ".join(f"{number} since {since_ns} ns" for number, since_ns in undecided.items())
        super().__init__(f"{waiting} operations wait forever: {who or f'open decisions {since or None}'}")


def play_deciding(
    builder: OperationGraphBuilder, decider: OperationDecider, until_ns: int = NEVER_NS
) -> tuple[OperationGraph, PlayedTimes]:
    """Play what ``builder`` holds and what ``decider`` adds to it; returns the graph in the end, and its times.

    Every operation starts as ``engine.play`` says. From the first decision at or after ``until_ns`` on nothing more is
    played: what was not reached has the times NEVER_NS. Raises DeadlockError where all that is left waits for a
    decision that is open or, as in a cycle, for itself; OverflowError where times are out of range.
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
    """The graph of a builder, which takes in what is added to the builder later.

    ``graph`` is what it has come to. Its arrays have room to grow; what is played already stays where it is.
    """

    def __init__(self, builder: OperationGraphBuilder) -> None:
        self._builder = builder
        self.graph = builder.close()
        builder.settle()
        self.graph.wide[:, START : END + 1] = NEVER_NS
        self._wide, self._narrow, self._spilled = self.graph.wide, self.graph.narrow, self.graph.spilled

    def extended(self, state: kernel.PlayState, answered: Sequence[int]) -> kernel.PlayState:
        """End the decisions ``answered`` now, and take in what was added; the engine goes on from what is returned."""
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
        """Have ``graph`` so many operations and so much room for successors more."""
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
        """Have an operation that was there before wait for one operation more."""
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
    """The state with room for queues that are new."""
    if (more := queues - len(state.heap)) <= 0:
        return state
    return state._replace(
        flows=np.concatenate((state.flows, np.full((more, kernel.COLUMNS), -1, np.int64))),
        work=np.concatenate((state.work, np.zeros((more, 2)))),
        heap=np.concatenate((state.heap, np.zeros(more, np.int64))),
    )


def _answered(state: kernel.PlayState, answered: Sequence[int]) -> kernel.PlayState:
    """The state in which the decisions ``answered`` are done now."""
    counts = state.counts
    for number in answered:
        if counts[kernel.TO_BE_DONE] == len(state.done):
            state = state._replace(done_at=kernel.grow(state.done_at), done=kernel.grow(state.done))
        kernel.push(
            state.done_at, state.done, int(counts[kernel.TO_BE_DONE]), int(counts[kernel.NOW]), number
        )
        counts[kernel.TO_BE_DONE] += 1
    return state
