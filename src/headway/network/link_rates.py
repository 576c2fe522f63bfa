"""What links carry, from messages between hosts: one is as slow as the slower of its two links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

UNEQUAL = 1.1  # times the slowest rate
MOST_STRIDES = 3


def further_strides(rates: Sequence[float]) -> range:
    """To which hosts each should send as well, where it sends to the next one at ``rates``: none if all are alike."""
    if len(rates) < 3 or max(rates) <= min(rates) * UNEQUAL:
        return range(0)
    return range(2, min(len(rates), MOST_STRIDES + 1))


def attributed(rates: Mapping[int, Sequence[float]]) -> tuple[list[float], list[float]]:
    """What links carry up and down where place ``i`` sent to place ``i + stride`` at ``rates[stride][i]``."""
    places = range(len(rates[1]))
    up = [max(own[place] for own in rates.values()) for place in places]
    down = [max(own[place - stride] for stride, own in rates.items()) for place in places]
    return up, down
