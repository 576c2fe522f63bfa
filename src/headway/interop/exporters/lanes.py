"""Lanes: spans brought onto tracks, and the order in which they begin and end there.

A lane is an array of moves in the order of time: ``2 * row`` where the span of that row begins, ``2 * row + 1``
where it ends. Where several moves fall on one moment, a span that ends there ends before others begin, the inner
before the outer, and a span of no length begins and ends at once.
"""

from __future__ import annotations

import heapq
from array import array

import numpy as np

from headway.arrays import Ints

MAX_DEPTH = 256  # viewers refuse deeper nesting
MAX_NESTING_LANES = (
    8  # what fits into none of so many is not nested any more, so that odd input costs no more
)


def nesting_lanes(starts: Ints, ends: Ints, inwards: Ints) -> list[Ints]:
    """Few lanes on which every span lies inside or outside of every other.

    Where spans start and end together, the one with the lower ``inwards`` holds the other.
    """
    order = np.lexsort((inwards, ~ends, starts))
    lanes: list[tuple[list[tuple[int, int]], array[int]]] = []
    left: list[int] = []
    for row, start, end in zip(order.tolist(), starts[order].tolist(), ends[order].tolist(), strict=True):
        for open_spans, moves in lanes:
            while open_spans and open_spans[-1][0] <= start:
                moves.append(2 * open_spans.pop()[1] + 1)
            if not open_spans or (open_spans[-1][0] >= end and len(open_spans) < MAX_DEPTH):
                break
        else:
            if len(lanes) == MAX_NESTING_LANES:
                left.append(row)
                continue
            open_spans, moves = [], array("q")
            lanes.append((open_spans, moves))
        moves.append(2 * row)
        open_spans.append((end, row))
    for open_spans, moves in lanes:
        moves.extend(2 * row + 1 for _, row in reversed(open_spans))
    rest = np.array(left, dtype=np.int64)
    return [
        *(np.array(moves, dtype=np.int64) for _, moves in lanes),
        *(2 * rest[lane >> 1] + (lane & 1) for lane in disjoint_lanes(starts[rest], ends[rest])),
    ]


def disjoint_lanes(starts: Ints, ends: Ints) -> list[Ints]:
    """As few lanes as there are spans at once, none of which overlaps another on its lane."""
    order = np.lexsort((ends, starts))
    lanes: list[array[int]] = []
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    for row, start, end in zip(order.tolist(), starts[order].tolist(), ends[order].tolist(), strict=True):
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane = len(lanes)
            lanes.append(array("q"))
        lanes[lane].extend((2 * row, 2 * row + 1))
        heapq.heappush(busy, (end, lane))
    return [np.array(moves, dtype=np.int64) for moves in lanes]
