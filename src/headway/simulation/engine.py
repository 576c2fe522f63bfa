"""The engine: plays a graph of operations. Deterministic; what shares a link gets max-min fair shares of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np

from headway.arrays import Ints
from headway.simulation import kernel
from headway.simulation.building import END, LATEST_NS, START, OperationGraph

WORTH_OPERATIONS = 20_000  # fewer are played before a compiler has been loaded
_LOOPS = (
    kernel.push, kernel.drop_first, kernel.grow, kernel.precedes, kernel.settle, kernel.leave_time_ns,
    kernel.proportional, kernel.reach, kernel.grant,
    kernel.set_rate, kernel.reallocate,
    kernel.save, kernel.hold, kernel.spend, kernel.overtake, kernel.start_flow, kernel.end_first_flow,
    kernel.run, kernel.are_asked,
    kernel.simulate,
)  # fmt: skip


def simulate_for(operations: int) -> Callable[..., kernel.PlayState]:
    """``kernel.simulate`` for a graph of so many operations: compiled, unless it is small or numba is missing."""
    if _compiled.cache_info().currsize == 0 and operations < WORTH_OPERATIONS:
        return kernel.simulate
    return _compiled()


@cache
def _compiled() -> Callable[..., kernel.PlayState]:
    if importlib.util.find_spec("numba") is None:
        return kernel.simulate
    from numba import njit

    # Loops call each other by their names in a module, which stay Python's: compiled ones get names of their own.
    names: dict[str, Any] = dict(vars(kernel))
    for loop in _LOOPS:
        assert isinstance(loop, FunctionType)
        copy = FunctionType(loop.__code__, names, loop.__name__)
        copy.__module__, copy.__qualname__ = loop.__module__, loop.__qualname__
        try:
            names[loop.__name__] = njit(cache=True)(copy)
        except RuntimeError:  # nowhere to keep it
            names[loop.__name__] = njit(copy)
    simulate: Callable[..., kernel.PlayState] = names["simulate"]
    return simulate


@dataclass(frozen=True, slots=True, eq=False)
class PlayedTimes:
    """When each operation started, and when it was done."""

    start_ns: Ints
    end_ns: Ints


def play(graph: OperationGraph) -> PlayedTimes:
    """Start every operation as soon as what it waits for is done.

    One that needs resources first waits for those in front of it in its queue. Then it shares them with the operations
    of other queues, as connections share links: rates are max-min fair (Bertsekas and Gallager, 1992). So it gets as
    much as any other on the scarcer of its two resources, and what those leave who are held up elsewhere. Where more
    than ``kernel.MANY`` hold each other up, all on a resource go on at the same fraction of their full rates instead.
    One that begins on resources that nobody used for a while is ahead by what these saved meanwhile
    (``Resources.burst_ns``), and by what others hold back at first who use a part of them (``Resources.window_ns``).
    Ties are broken by the operations' numbers. Raises ValueError where the graph has a cycle
    or decisions (``deciding.play_deciding`` plays those), OverflowError where times are out of range.
    """
    if not len(graph):
        nothing = np.zeros(0, dtype=np.int64)
        return PlayedTimes(nothing, nothing)
    counts = play_on(graph, first_state(graph)).counts
    if counts[kernel.STATUS] == kernel.PAUSED:
        raise ValueError("the graph has decisions but no decider")
    if missing := len(graph) - int(counts[kernel.PLAYED]):
        raise ValueError(f"the graph has a cycle: {missing} operations wait for each other")
    return played_times(graph)


def first_state(graph: OperationGraph) -> kernel.PlayState:
    """The beginning, when nothing of ``graph`` has been played."""
    return kernel.first_state(graph.resources.room, graph.resources.burst_ns, graph.queues)


def play_on(graph: OperationGraph, state: kernel.PlayState) -> kernel.PlayState:
    """Play ``graph`` on from ``state`` to its end or the next decisions, whichever comes first.

    Raises OverflowError where times are out of range.
    """
    routes, known_count = graph.routes, int(state.counts[kernel.KNOWN])
    longest_ns = max(int(graph.duration_ns[known_count:].max(initial=0)), int(routes.latency_ns.max()))
    if longest_ns <= LATEST_NS:
        state = simulate_for(len(graph))(
            graph.wide, graph.narrow, graph.spilled, routes.sender, routes.receiver, routes.demand, routes.queue,
            routes.latency_ns, graph.resources.burst_ns, graph.resources.window_ns, graph.resources.changes, state,
        )  # fmt: skip
    if longest_ns > LATEST_NS or state.counts[kernel.STATUS] == kernel.OUT_OF_RANGE:
        raise OverflowError("times are out of range")
    return state


def played_times(graph: OperationGraph) -> PlayedTimes:
    """When the operations of a graph ran that was just played."""
    return PlayedTimes(graph.wide[:, START].copy(), graph.wide[:, END].copy())
