"""The least lateness: how late the last of some work is at best, on one link that may have saved something up.

For one link and work that may be interrupted, serving what is due first gives the least lateness (Horn, 1974). That
holds for a token bucket too: what it lets through at once is lost to nobody by being used as soon as there is work.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

Work = tuple[float, float, float]
"""When it is released, when it is due, and for how long the link is used by it (ns)."""


def least_lateness(work: Iterable[Work], credit_ns: float = 0.0) -> float:
    """The least that the latest of ``work`` can be late on one link; may be negative, and is -inf of nothing.

    Before the first of it the link has saved ``credit_ns`` of its time, which it does at once; it saves up again while
    there is nothing to do, and never more than that.
    """
    coming = sorted(work)
    latest = float("-inf")
    now, saved = 0.0, credit_ns
    unfinished: list[tuple[float, float]] = []  # due, what is left
    index = 0
    while index < len(coming) or unfinished:
        if not unfinished and coming[index][0] > now:
            saved = min(credit_ns, saved + coming[index][0] - now)
            now = coming[index][0]
        while index < len(coming) and coming[index][0] <= now:
            _, due, length = coming[index]
            heapq.heappush(unfinished, (due, length))
            index += 1
        due, left = heapq.heappop(unfinished)
        spent = min(saved, left)
        saved, left = saved - spent, left - spent
        until = coming[index][0] if index < len(coming) else float("inf")
        if now + left > until:
            heapq.heappush(unfinished, (due, left - (until - now)))
            now = until
        else:
            now += left
            latest = max(latest, now - due)
    return latest
