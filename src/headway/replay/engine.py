"""The engine: plays a dataflow graph. Deterministic; operations on one link queue in order of readiness."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from headway.graph.dataflow import Dataflow, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """When each operation started, and when it was done."""

    start_ns: Ints
    end_ns: Ints


def play(graph: Dataflow) -> Schedule:
    """Start every operation as soon as what it waits for is done and its resources are free.

    Ties are broken by the operations' numbers. Raises ValueError where the graph has a cycle.
    """
    count = len(graph)
    waits_for = graph.waits_for.tolist()
    duration_ns, latency_ns = graph.duration_ns.tolist(), graph.latency_ns.tolist()
    sender, receiver = graph.sender.tolist(), graph.receiver.tolist()
    first, successors = graph.first.tolist(), graph.successors.tolist()
    free_ns = [0] * (graph.resources + 1)  # the last stands for "no resource" and stays free
    start_ns, end_ns = [0] * count, [0] * count
    ready_ns = [0] * count
    queue = [(0, number) for number in range(count) if waits_for[number] == 0]
    played = 0
    while queue:
        now_ns, number = heapq.heappop(queue)
        played += 1
        out, into = sender[number], receiver[number]
        begin_ns = max(now_ns, free_ns[out], free_ns[into])
        released_ns = begin_ns + duration_ns[number]
        if out >= 0:
            free_ns[out] = released_ns
        if into >= 0:
            free_ns[into] = released_ns
        done_ns = released_ns + latency_ns[number]
        start_ns[number], end_ns[number] = begin_ns, done_ns
        for successor in successors[first[number] : first[number + 1]]:
            ready_ns[successor] = max(ready_ns[successor], done_ns)
            waits_for[successor] -= 1
            if waits_for[successor] == 0:
                heapq.heappush(queue, (ready_ns[successor], successor))
    if played < count:
        raise ValueError(f"the graph has a cycle: {count - played} operations wait for each other")
    return Schedule(np.array(start_ns, dtype=np.int64), np.array(end_ns, dtype=np.int64))
