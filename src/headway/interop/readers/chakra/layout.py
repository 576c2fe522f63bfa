"""When nodes run that state no times: as soon as what they depend on has ended and their queue is free.

The host computes one node at a time, each stream of a device one, and each process group carries one collective; of
those that could run, a queue takes the one with the lowest id, as ASTRA-sim does. What has no queue runs at once.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from headway.arrays import Ints

LONGEST_NS = 2**62


@dataclass(frozen=True, eq=False)
class Layout:
    """When each node started, and when everything that it depends on had ended; -1 for what can never start."""

    start_ns: Ints
    ready_ns: Ints

    @property
    def stuck(self) -> int:
        """How many nodes wait for themselves."""
        return int((self.start_ns < 0).sum())


class EndlessError(ValueError):
    """Everything together takes longer than can be counted."""


def lay_out(
    depends_on: Sequence[Sequence[int]],
    duration_ns: Sequence[int],
    queue: Sequence[Hashable],
    number: Sequence[int],
) -> Layout:
    """Run the nodes. ``depends_on`` has indices, ``queue`` None for what never queues, ``number`` orders a queue.

    Raises EndlessError where times outgrow 64 bits.
    """
    count = len(duration_ns)
    after: list[list[int]] = [[] for _ in range(count)]
    pending = np.zeros(count, dtype=np.int64).tolist()
    for node, needs in enumerate(depends_on):
        for need in set(needs):
            after[need].append(node)
            pending[node] += 1
    start, ready = [-1] * count, [-1] * count
    waiting: defaultdict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    busy: set[Hashable] = set()
    ends: list[tuple[int, int]] = []  # a heap of when running nodes end
    now = 0

    def run(node: int) -> None:
        start[node] = now
        heapq.heappush(ends, (now + duration_ns[node], node))

    def offer(node: int) -> None:
        ready[node] = now
        if queue[node] is None:
            run(node)
        else:
            heapq.heappush(waiting[queue[node]], (number[node], node))

    for node in range(count):
        if not pending[node]:
            offer(node)
    touched = set(waiting)
    while True:
        for free in touched:
            if free not in busy and waiting[free]:
                busy.add(free)
                run(heapq.heappop(waiting[free])[1])
        if not ends:
            break
        now = ends[0][0]
        if now > LONGEST_NS:
            raise EndlessError
        touched = set()
        while ends and ends[0][0] == now:
            _, node = heapq.heappop(ends)
            busy.discard(queue[node])
            touched.add(queue[node])
            for child in after[node]:
                pending[child] -= 1
                if not pending[child]:
                    offer(child)
                    touched.add(queue[child])
        touched.discard(None)
    return Layout(np.array(start, dtype=np.int64), np.array(ready, dtype=np.int64))
