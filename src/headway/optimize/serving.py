"""Jobs on channels: when the collectives of one backward begin and end. The same rules as replay, on one link."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from headway.optimize.link_cost import CollectiveCost


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

    All ranks are taken to be alike, so that one link stands for all. Jobs under way together take turns on it, a
    message each, and pay their overheads one after the other.
    """
    return _serve_one_by_one(jobs) if channels == 1 else _serve_together(jobs, channels)


def _serve_one_by_one(jobs: Sequence[Job]) -> list[float]:
    free_ns = 0.0
    ends = []
    for asked_ns, size_bytes, cost, _, before_ns in jobs:  # job ``after`` is done when the channel is free
        free_ns = max(free_ns, asked_ns) + before_ns + cost.time_ns(size_bytes)
        ends.append(free_ns)
    return ends


def _serve_together(jobs: Sequence[Job], channels: int) -> list[float]:
    ends = [0.0] * len(jobs)
    begin_ns = [job.asked_ns for job in jobs]
    missing = [(number >= channels) + (job.after >= 0) for number, job in enumerate(jobs)]
    waiting: list[list[int]] = [[] for _ in jobs]
    for number, job in enumerate(jobs):
        if job.after >= 0:
            waiting[job.after].append(number)
        if number >= channels:
            waiting[number - channels].append(number)
    turns = [_turns(job) for job in jobs]
    left = [messages for messages, _, _ in turns]
    overhead_due = [job.cost.overhead_ns > 0 for job in jobs]
    queue = [(begin_ns[n] + job.before_ns, n) for n, job in enumerate(jobs) if not missing[n]]
    heapq.heapify(queue)
    link_ns = core_ns = 0.0
    while queue:
        now_ns, number = heapq.heappop(queue)
        if overhead_due[number]:
            overhead_due[number] = False
            core_ns = max(now_ns, core_ns) + jobs[number].cost.overhead_ns
            heapq.heappush(queue, (core_ns, number))
            continue
        if left[number]:
            left[number] -= 1
            _, busy_ns, arrival_ns = turns[number]
            link_ns = max(now_ns, link_ns) + busy_ns
            heapq.heappush(queue, (link_ns + arrival_ns, number))
            continue
        ends[number] = now_ns
        for follower in waiting[number]:
            begin_ns[follower] = max(begin_ns[follower], now_ns)
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(queue, (begin_ns[follower] + jobs[follower].before_ns, follower))
    return ends


def _turns(job: Job) -> tuple[int, float, float]:
    """A job's messages, for how long each uses the link, and how much later each has arrived."""
    cost = job.cost
    if not cost.messages:
        return 0, 0.0, 0.0
    busy_ns = cost.ns_per_byte * job.size_bytes
    arrival_ns = max(0.0, cost.time_ns(job.size_bytes) - cost.overhead_ns - busy_ns)
    return cost.messages, busy_ns / cost.messages, arrival_ns / cost.messages
