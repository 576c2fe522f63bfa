"""Jobs on channels: when the collectives of one backward begin and end. The same rules as replay, on one link."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from headway.planning.link_cost import CollectiveCost


class Job(NamedTuple):
    """One collective. It begins when it was asked for, its channel is free, job ``after`` is done and
    ``before_ns`` of work has been done since.
    """

    asked_ns: float
    size_bytes: int
    cost: CollectiveCost
    after: int = -1
    before_ns: float = 0.0


def serve(jobs: Sequence[Job], channels: int) -> list[float]:
    """When each job ends. Job ``n`` is served by channel ``n % channels``, in order.

    All ranks are taken to be alike, so that one link stands for all. Jobs in flight together share it evenly while
    their messages are on it, and pay their overheads one after the other.
    """
    return _serve_one_by_one(jobs) if channels == 1 else _Together(jobs, channels).serve()


def _serve_one_by_one(jobs: Sequence[Job]) -> list[float]:
    free_ns = 0.0
    ends = []
    for asked_ns, size_bytes, cost, _, before_ns in jobs:  # job ``after`` is done when the channel is free
        free_ns = max(free_ns, asked_ns) + before_ns + cost.time_ns(size_bytes)
        ends.append(free_ns)
    return ends


class _Together:
    """Jobs on several channels, from one event to the next: a wake of a job that waits, or a message off the link."""

    def __init__(self, jobs: Sequence[Job], channels: int) -> None:
        self._jobs = jobs
        self._begin_ns = [job.asked_ns for job in jobs]
        self._missing = [(number >= channels) + (job.after >= 0) for number, job in enumerate(jobs)]
        self._waiting: list[list[int]] = [[] for _ in jobs]
        for number, job in enumerate(jobs):
            if job.after >= 0:
                self._waiting[job.after].append(number)
            if number >= channels:
                self._waiting[number - channels].append(number)
        self._turns = [_turns(job) for job in jobs]
        self._messages = [messages for messages, _, _ in self._turns]  # still to be sent
        self._overhead_due = [job.cost.overhead_ns > 0 for job in jobs]
        self._wakes = [
            (self._begin_ns[n] + jobs[n].before_ns, n) for n in range(len(jobs)) if not self._missing[n]
        ]
        heapq.heapify(self._wakes)
        self._on_link: dict[int, float] = {}  # job: what is left of its message at full rate
        self._core_ns = 0.0
        self._ends = [0.0] * len(jobs)

    def serve(self) -> list[float]:
        """When each job ends."""
        now_ns = 0.0
        while self._wakes or self._on_link:
            wake_ns = self._wakes[0][0] if self._wakes else math.inf
            left_ns = min(self._on_link.values(), default=math.inf) * len(self._on_link or (0,))
            if wake_ns <= now_ns + left_ns:
                self._advance(max(0.0, wake_ns - now_ns))
                now_ns = max(now_ns, wake_ns)
                self._wake(heapq.heappop(self._wakes)[1], now_ns)
            else:
                self._advance(left_ns)
                now_ns += left_ns
                sent = min(self._on_link, key=self._on_link.__getitem__)
                del self._on_link[sent]
                heapq.heappush(self._wakes, (now_ns + self._turns[sent][2], sent))
        return self._ends

    def _advance(self, elapsed_ns: float) -> None:
        for number in self._on_link:
            self._on_link[number] -= elapsed_ns / len(self._on_link)

    def _wake(self, number: int, now_ns: float) -> None:
        """A job wants to pay its overhead, to send a message, or is done."""
        if self._overhead_due[number]:
            self._overhead_due[number] = False
            self._core_ns = max(now_ns, self._core_ns) + self._jobs[number].cost.overhead_ns
            heapq.heappush(self._wakes, (self._core_ns, number))
        elif self._messages[number]:
            self._messages[number] -= 1
            self._on_link[number] = self._turns[number][1]
        else:
            self._ends[number] = now_ns
            for follower in self._waiting[number]:
                self._begin_ns[follower] = max(self._begin_ns[follower], now_ns)
                self._missing[follower] -= 1
                if not self._missing[follower]:
                    ready_ns = self._begin_ns[follower] + self._jobs[follower].before_ns
                    heapq.heappush(self._wakes, (ready_ns, follower))


def _turns(job: Job) -> tuple[int, float, float]:
    """A job's messages, for how long each uses the link, and how much later each has arrived."""
    cost = job.cost
    if not cost.messages:
        return 0, 0.0, 0.0
    busy_ns = cost.ns_per_byte * job.size_bytes
    arrival_ns = max(0.0, cost.time_ns(job.size_bytes) - cost.overhead_ns - busy_ns)
    return cost.messages, busy_ns / cost.messages, arrival_ns / cost.messages
