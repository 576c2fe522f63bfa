"""Workers that average in pairs, as a plain event loop: what the simulation is held against. Nothing of Headway."""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass(frozen=True)
class Workers:
    """Workers on hosts of their own: what each step computes, and their links."""

    compute_ns: tuple[tuple[int, ...], ...]  # of each rank, a number a step; ranks may have different numbers
    up_gbps: tuple[float, ...]
    down_gbps: tuple[float, ...]
    latency_ns: int
    size_bytes: int  # of what a pair averages; even

    def message_ns(self, sender: int, receiver: int) -> int:
        """How long half of it takes on the wire."""
        return round(self.size_bytes // 2 * 8 / min(self.up_gbps[sender], self.down_gbps[receiver]))

    def averaging_ns(self, one: int, other: int) -> int:
        """How long a pair that begins together takes: both send a half, then the sum of the half that came."""
        there_ns, back_ns, latency_ns = (
            self.message_ns(one, other),
            self.message_ns(other, one),
            self.latency_ns,
        )
        first_at_other_ns, first_at_one_ns = there_ns + latency_ns, back_ns + latency_ns
        second_at_other_ns = max(first_at_one_ns, there_ns) + there_ns + latency_ns
        second_at_one_ns = max(first_at_other_ns, back_ns) + back_ns + latency_ns
        return max(second_at_one_ns, second_at_other_ns)


def paired_first_come(workers: Workers) -> list[list[int]]:
    """When each rank ends each of its steps (ns), where who arrives first averages with who arrives next.

    Those who arrive at the same time do so in order of ranks. A rank that nobody is left to average with goes on alone.
    """
    ends_ns: list[list[int]] = [[] for _ in workers.compute_ns]
    training = {rank for rank, steps in enumerate(workers.compute_ns) if steps}
    events: list[tuple[int, int]] = []  # arrivals

    def begin_step(rank: int, now_ns: int) -> None:
        step = len(ends_ns[rank])
        if step < len(workers.compute_ns[rank]):
            heapq.heappush(events, (now_ns + workers.compute_ns[rank][step], rank))

    for rank in training:
        begin_step(rank, 0)
    leaving: list[tuple[int, int]] = []
    waiting = -1
    while events or leaving:
        moment_ns = min(queue[0][0] for queue in (events, leaving) if queue)
        while leaving and leaving[0][0] == moment_ns:
            training.discard(heapq.heappop(leaving)[1])
        while events and events[0][0] == moment_ns:
            _, rank = heapq.heappop(events)
            if waiting < 0:
                waiting = rank
                continue
            end_ns = moment_ns + workers.averaging_ns(waiting, rank)
            for member in (waiting, rank):
                _end_step(member, end_ns, ends_ns, workers, leaving)
                begin_step(member, end_ns)
            waiting = -1
        if waiting >= 0 and training == {waiting}:
            alone, waiting = waiting, -1
            _end_step(alone, moment_ns, ends_ns, workers, leaving)
            begin_step(alone, moment_ns)
    return ends_ns


def _end_step(
    rank: int, end_ns: int, ends_ns: list[list[int]], workers: Workers, leaving: list[tuple[int, int]]
) -> None:
    ends_ns[rank].append(end_ns)
    if len(ends_ns[rank]) == len(workers.compute_ns[rank]):
        heapq.heappush(leaving, (end_ns, rank))
