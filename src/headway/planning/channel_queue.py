"""Simulates when the collectives of a backward begin and end, by the rules of replay but on one link."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from headway.planning.link_cost import CollectiveCost


class Job(NamedTuple):
    """One collective. It begins once it is requested, its channel is free, job ``after`` is done, and then ``before_ns``
    of work is done: on the channel or, if ``apart``, on one thread for all such work.
    """

    asked_ns: float
    size_bytes: int
    cost: CollectiveCost
    after: int = -1
    before_ns: float = 0.0
    apart: bool = False


def serve(jobs: Sequence[Job], channels: int) -> list[float]:
    """The end of each job. Channel ``n % channels`` serves job ``n``, in order.

    Ranks are assumed identical, so one link stands for all. Concurrent jobs share it evenly while their messages are on
    it, and pay their overheads one after the other.
    """
    return _serve_one_by_one(jobs) if channels == 1 else _Together(jobs, channels).serve()


def begins(jobs: Sequence[Job], ends: Sequence[float], channels: int) -> list[float]:
    """The begin of each job's collective, after the work before it; ``ends`` are the jobs' ends."""
    begin_times: list[float] = []
    worked_ns = 0.0
    for number, job in enumerate(jobs):
        channel_ns = ends[number - channels] if number >= channels else 0.0
        ready_ns = max(job.asked_ns, ends[job.after] if job.after >= 0 else 0.0)
        if job.apart:
            worked_ns = max(worked_ns, ready_ns) + job.before_ns
            begin_times.append(max(worked_ns, channel_ns))
        else:
            begin_times.append(max(ready_ns, channel_ns) + job.before_ns)
    return begin_times


def critical_path(jobs: Sequence[Job], ends: Sequence[float], channels: int, last: int) -> list[int]:
    """The jobs that determine the end of job ``last``, back to one that only waited for its request.

    ``ends`` are the jobs' ends on ``channels``.
    """
    path = [last]
    while True:
        number = path[-1]
        earlier = [candidate for candidate in (number - channels, jobs[number].after) if candidate >= 0]
        before = max(earlier, key=ends.__getitem__, default=-1)
        if before < 0 or ends[before] <= jobs[number].asked_ns:
            return path
        path.append(before)


def _serve_one_by_one(jobs: Sequence[Job]) -> list[float]:
    free_ns = worked_ns = 0.0
    ends: list[float] = []
    for asked_ns, size_bytes, cost, after, before_ns, apart in jobs:
        if apart:
            worked_ns = max(worked_ns, asked_ns, ends[after] if after >= 0 else 0.0) + before_ns
            free_ns = max(free_ns, worked_ns)
        else:  # a free channel implies that job ``after`` is done
            free_ns = max(free_ns, asked_ns) + before_ns
        free_ns += cost.time_ns(size_bytes)
        ends.append(free_ns)
    return ends


class _Together:
    """Event simulation of jobs on several channels: a waiting job wakes, or a message leaves the link."""

    def __init__(self, jobs: Sequence[Job], channels: int) -> None:
        self._jobs = jobs
        apart = [number for number, job in enumerate(jobs) if job.apart]
        self._works = {len(jobs) + index: number for index, number in enumerate(apart)}  # work -> its job
        self._begin_ns = [job.asked_ns for job in (*jobs, *(jobs[number] for number in apart))]
        self._before_ns = [0.0 if job.apart else job.before_ns for job in jobs]
        self._before_ns += [jobs[number].before_ns for number in apart]
        self._missing = [0] * len(self._begin_ns)
        self._waiting: list[list[int]] = [[] for _ in self._begin_ns]
        for number, job in enumerate(jobs):
            if number >= channels:
                self._wait(number, number - channels)
            if job.after >= 0 and not job.apart:
                self._wait(number, job.after)
        for work, number in self._works.items():
            self._wait(number, work)
            if work > len(jobs):
                self._wait(work, work - 1)
            if jobs[number].after >= 0:
                self._wait(work, jobs[number].after)
        self._turns = [_turns(job) for job in jobs]
        self._messages = [messages for messages, _, _ in self._turns]  # still to be sent
        self._overhead_due = [job.cost.overhead_ns > 0 for job in jobs]
        self._wakes = [
            (begin_ns + self._before_ns[n], n)
            for n, begin_ns in enumerate(self._begin_ns)
            if not self._missing[n]
        ]
        heapq.heapify(self._wakes)
        self._on_link: dict[int, float] = {}  # job -> remaining time of its message at full rate
        self._core_ns = 0.0
        self._ends = [0.0] * len(jobs)

    def _wait(self, number: int, earlier: int) -> None:
        self._missing[number] += 1
        self._waiting[earlier].append(number)

    def serve(self) -> list[float]:
        """The end of each job."""
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
        """Handle a wake: a job pays its overhead, sends a message or is done, or work is done."""
        if number in self._works:
            self._let_go(number, now_ns)
        elif self._overhead_due[number]:
            self._overhead_due[number] = False
            self._core_ns = max(now_ns, self._core_ns) + self._jobs[number].cost.overhead_ns
            heapq.heappush(self._wakes, (self._core_ns, number))
        elif self._messages[number]:
            self._messages[number] -= 1
            self._on_link[number] = self._turns[number][1]
        else:
            self._ends[number] = now_ns
            self._let_go(number, now_ns)

    def _let_go(self, number: int, now_ns: float) -> None:
        """Release the jobs that wait for ``number``."""
        for follower in self._waiting[number]:
            self._begin_ns[follower] = max(self._begin_ns[follower], now_ns)
            self._missing[follower] -= 1
            if not self._missing[follower]:
                ready_ns = self._begin_ns[follower] + self._before_ns[follower]
                heapq.heappush(self._wakes, (ready_ns, follower))


def _turns(job: Job) -> tuple[int, float, float]:
    """A job's messages, the link time of each, and the delay until each arrives."""
    cost = job.cost
    if not cost.messages:
        return 0, 0.0, 0.0
    busy_ns = cost.ns_per_byte * job.size_bytes
    arrival_ns = max(0.0, cost.time_ns(job.size_bytes) - cost.overhead_ns - busy_ns)
    return cost.messages, busy_ns / cost.messages, arrival_ns / cost.messages
