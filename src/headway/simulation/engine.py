"""The simulation engine: plays a graph of operations with max-min fair sharing of links. Deterministic."""

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

WORTH_OPERATIONS = 20_000  # smaller graphs take less time than loading the compiler
_LOOPS = (
    kernel.push, kernel.drop_first, kernel.grow, kernel.precedes, kernel.settle, kernel.leave_time_ns,
    kernel.proportional, kernel.reach, kernel.grant,
    kernel.set_rate, kernel.reallocate,
    kernel.save, kernel.hold, kernel.spend, kernel.overtake, kernel.start_flow, kernel.end_first_flow,
    kernel.run, kernel.are_asked,
    kernel.simulate,
)  # fmt: skip


def simulate_for(operations: int) -> Callable[..., kernel.PlayState]:
    """``kernel.simulate`` for a graph of that size: compiled, unless the graph is small or numba is missing."""
    if _compiled.cache_info().currsize == 0 and operations < WORTH_OPERATIONS:
        return kernel.simulate
    return _compiled()


@cache
def _compiled() -> Callable[..., kernel.PlayState]:
    if importlib.util.find_spec("numba") is None:
        return kernel.simulate
    from numba import njit

    # Loops call each other through module globals, so compiled copies get their own globals.
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
    """The start and end of each operation."""

    start_ns: Ints
    end_ns: Ints


def play(graph: OperationGraph) -> PlayedTimes:
    """Play a graph: every operation starts as soon as everything that it waits for is done.

    An operation with resources first waits for those before it in its queue. Then it shares the resources with other
    queues, as connections share links, at max-min fair rates (Bertsekas and Gallager, 1992): it gets an equal share of
    the scarcer of its two resources, plus what operations limited elsewhere leave. If more than ``kernel.MANY``
    operations are coupled, all on a resource run at the same fraction of their full rates instead. An operation on
    idle resources starts ahead by the credit that these saved (``Resources.burst_ns``), and by what other traffic has
    not queued yet (``Resources.window_ns``). Ties are broken by operation numbers. Raises ValueError for a graph with a
    cycle or with decisions (see ``deciding.play_deciding``), OverflowError if times are out of range.
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
    """The state before anything of ``graph`` is played."""
    return kernel.first_state(graph.resources.room, graph.resources.burst_ns, graph.queues)


def play_on(graph: OperationGraph, state: kernel.PlayState) -> kernel.PlayState:
    """Continue to play ``graph`` from ``state`` to its end or the next decisions.

    Raises OverflowError if times are out of range.
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
    """The times of the operations of a graph that was just played."""
    return PlayedTimes(graph.wide[:, START].copy(), graph.wide[:, END].copy())
