"""What links carry, from messages between hosts: one is as slow as the slower of its two links."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

UNEQUAL = 1.1  # times the slowest rate
MOST_STRIDES = 3


def link_rates(measured: Callable[[int], Sequence[float]]) -> tuple[list[float], list[float]]:
    """What the link of each place carries up and down; ``measured`` has each send so many places on, all at once.

    It is asked for the next one, and where rates differ for others as well.
    """
    found = {1: measured(1)}
    places = len(found[1])
    if places > 2 and max(found[1]) > min(found[1]) * UNEQUAL:
        for stride in range(2, min(places, MOST_STRIDES + 1)):
            found[stride] = measured(stride)
    return attributed(found)


def attributed(rates: Mapping[int, Sequence[float]]) -> tuple[list[float], list[float]]:
    """What links carry up and down where place ``i`` sent to place ``i + stride`` at ``rates[stride][i]``."""
    places = range(len(rates[1]))
    up = [max(own[place] for own in rates.values()) for place in places]
    down = [max(own[place - stride] for stride, own in rates.items()) for place in places]
    return up, down
