"""The least lateness: how late the last of some work is at best, on one link."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

Work = tuple[float, float, float]
"""When it is released, when it is due, and for how long the link is used by it (ns)."""


def least_lateness(work: Iterable[Work]) -> float:
    """The least that the latest of ``work`` can be late on one link; may be negative, and is -inf of nothing.

    For one link and work that may be interrupted, serving what is due first gives the least lateness (Horn, 1974). It
    is the largest excess, over all pairs of moments, of what is released and due between the two over the time between
    them; so where the link can do something more, once within any time, the least lateness is less by that.
    """
    coming = sorted(work)
    latest = float("-inf")
    now = 0.0
    unfinished: list[tuple[float, float]] = []  # due, what is left
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
