"""The engine: plays a dataflow graph. Deterministic; what shares a link gets max-min fair shares of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.simulation import kernel
from headway.simulation.compiled import simulate_for
from headway.simulation.operations import END, LATEST_NS, START, Ints, OperationGraph


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
    (``Resources.burst_ns``). Ties are broken by the operations' numbers. Raises ValueError where the graph has a cycle,
    OverflowError where times are out of range.
    """
    count = len(graph)
    if not count:
        nothing = np.zeros(0, dtype=np.int64)
        return PlayedTimes(nothing, nothing)
    routes = graph.routes
    longest_ns = max(int(graph.duration_ns.max()), int(routes.latency_ns.max()))
    played = (
        kernel.OUT_OF_RANGE
        if longest_ns > LATEST_NS
        else simulate_for(count)(
            graph.wide, graph.narrow, graph.spilled, routes.sender, routes.receiver, routes.asked, routes.queue,
            routes.latency_ns, graph.resources.room, graph.resources.burst_ns, graph.resources.changes, graph.queues,
        )
    )  # fmt: skip
    if played == kernel.OUT_OF_RANGE:
        raise OverflowError("times are out of range")
    if played < count:
        raise ValueError(f"the graph has a cycle: {count - played} operations wait for each other")
    return PlayedTimes(graph.wide[:, START].copy(), graph.wide[:, END].copy())
