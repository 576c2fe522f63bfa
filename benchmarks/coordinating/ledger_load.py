"""What decisions alone cost a coordinator of many workers: its ledger is told of questions and votes in this process.

Everything else of a request (connection, message, journal) costs the same however many workers there are.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import psutil

from headway.strategies.partial_all_reduce.coordinator import ledger as events
from headway.strategies.partial_all_reduce.coordinator.ledger import Ledger
from headway.strategies.partial_all_reduce.coordinator.messages import GroupStart
from headway.strategies.partial_all_reduce.coordinator.options import GeneratorChoice

GAP_NS = 10_000  # of the job's clock, between two events
WORKERS_A_HOST = 8


@dataclass(frozen=True)
class Load:
    """What a request costs the ledger, in the mean, and what the ledger holds."""

    request_us: float
    memory_mb: float
    requests: int


def measured(generator: str, workers: int, seconds: float) -> Load:
    """Workers ask in random order, and vote as soon as they are granted a group, for some seconds."""
    choice = GeneratorChoice.parse(generator, 0)
    before_bytes = psutil.Process().memory_info().rss
    ledger = Ledger(choice.make, "job")
    now_ns = 0
    ledger.apply(events.Booted(now_ns=now_ns, boot="00000000"))
    for worker in range(workers):
        # Not validated: there are more workers than a coordinator takes.
        joined = events.Joined.model_construct(
            now_ns=now_ns, worker=worker, session="0" * 32, address=f"10.0.0.1:{worker}",
            host=f"host{worker // WORKERS_A_HOST}",
        )  # fmt: skip
        ledger.apply(joined)
    draw = random.Random(0)
    free = list(range(workers))
    draw.shuffle(free)
    requests = 0
    spent_s, begun_s = 0.0, time.perf_counter()
    while time.perf_counter() < begun_s + seconds:
        now_ns += GAP_NS
        started: list[GroupStart] = []
        called_s = time.thread_time()
        if ledger.wake_ns is not None and ledger.wake_ns <= now_ns:
            started += _started(ledger, events.Woke(now_ns=now_ns))
        elif free:
            asked = events.Asked.model_construct(now_ns=now_ns, worker=free.pop(), iteration=0)
            started += _started(ledger, asked)
            requests += 1
        else:
            now_ns = max(now_ns, ledger.wake_ns or now_ns)
        spent_s += time.thread_time() - called_s
        while started:
            start = started.pop()
            for member in start.members if len(start.members) > 1 else ():
                vote = events.Voted.model_construct(
                    now_ns=now_ns, worker=member.worker, number=start.number, key=start.key, reduced=True
                )
                called_s = time.thread_time()
                started += _started(ledger, vote)
                spent_s += time.thread_time() - called_s
                requests += 1
            free[:0] = [member.worker for member in start.members]
    memory_mb = (psutil.Process().memory_info().rss - before_bytes) / 1e6
    return Load(spent_s / max(1, requests) * 1e6, memory_mb, requests)


def _started(ledger: Ledger, event: events.AnyEvent) -> list[GroupStart]:
    return [each for each in ledger.apply(event) if isinstance(each, GroupStart)]
