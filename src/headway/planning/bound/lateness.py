"""Computes the least possible lateness of work on one link."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

Work = tuple[float, float, float]
"""Release time, due time, and duration on the link (ns)."""


def least_lateness(work: Iterable[Work]) -> float:
    """The least possible maximum lateness of ``work`` on one link; may be negative, and is -inf without work.

    With preemption on one link, earliest due date first is optimal (Horn, 1974). The result is the largest excess, over
    all intervals, of the work released and due within it over its length; so a burst that the link can carry once in any
    interval lowers the lateness by that much.
    """
    coming = sorted(work)
    latest = float("-inf")
    now = 0.0
    unfinished: list[tuple[float, float]] = []  # due time, remaining duration
    index = 0
    while index < len(coming) or unfinished:
        if not unfinished:
            now = max(now, coming[index][0])
        while index < len(coming) and coming[index][0] <= now:
            _, due, length = coming[index]
            heapq.heappush(unfinished, (due, length))
            index += 1
        due, left = heapq.heappop(unfinished)
        until = coming[index][0] if index < len(coming) else float("inf")
        if now + left > until:
            heapq.heappush(unfinished, (due, left - (until - now)))
            now = until
        else:
            now += left
            latest = max(latest, now - due)
    return latest
