"""Which of two ranks' collectives are the same, told by where they end together.

Order alone would do if both had recorded the same collectives, which they have not: they begin at different ones, and
profilers lose some. But members of a collective end together. Of all distances between two ranks' clocks, the one
at which most of their collectives end together is right, however far the clocks are apart.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from headway.arrays import Flags, Ints
from headway.interop.readers.completed import CompletedCollectives, nearest
from headway.interop.readers.distances import FINEST_NS, TOGETHER_NS, distance_of_clocks_ns

LEAST_PAIRS, LEAST_SHARE = 3, 0.3  # of ends that have to agree
_TAIL = 6.0  # how many times the usual ends may be apart
_LATE_NS = 50_000_000  # how far they may be apart if nothing was lost, so that order tells which is which
_LOSSLESS, _MANY = 0.02, 0.1  # shares of collectives that are lost: none, as it were; too many to go by order


def paired(known: CompletedCollectives, own: CompletedCollectives) -> tuple[Ints, Ints | None]:
    """For each of ``own`` the number of the one in ``known`` that is the same, or -1; and how far its clock is ahead.

    That is None where too few end together.
    """
    distance_ns = distance_of_clocks_ns(known, own)
    moved_ns = np.full(len(own), distance_ns, dtype=np.int64)
    pair = nearest(known, own, moved_ns, TOGETHER_NS)
    fewest = min(len(known), len(own))
    if (pair >= 0).sum() < max(min(LEAST_PAIRS, fewest), LEAST_SHARE * fewest):
        return np.full(len(own), -1, dtype=np.int64), None
    moved_ns, usual_ns = _line(known, own, pair, distance_ns)
    near_ns = min(TOGETHER_NS, max(FINEST_NS, round(_TAIL * usual_ns)))
    pair = nearest(known, own, moved_ns, near_ns)
    lost = _lost_share(known, own)
    if lost <= _MANY:
        late_ns = _LATE_NS if lost <= _LOSSLESS else min(TOGETHER_NS, round(_TAIL * near_ns))
        _fill(known, own, pair, moved_ns, late_ns)
    return np.where(pair >= 0, known.number[pair], -1), moved_ns


def same_order(known: CompletedCollectives, own: CompletedCollectives) -> Ints:
    """For each of ``own`` the number of that in ``known`` which is as manieth of its kind in its step, or -1."""
    place = dict(zip(_places(known), known.number.tolist(), strict=True))
    return np.array([place.get(one, -1) for one in _places(own)], dtype=np.int64)


def _places(ended: CompletedCollectives) -> list[tuple[int, int, int]]:
    counted: dict[tuple[int, int], int] = {}
    places = [(0, 0, 0)] * len(ended)
    for index in np.argsort(ended.asked_ns, kind="stable").tolist():
        kind = int(ended.key[index]), int(ended.step[index])
        counted[kind] = counted.get(kind, -1) + 1
        places[index] = (*kind, counted[kind])
    return places


def _line(
    known: CompletedCollectives, own: CompletedCollectives, pair: Ints, distance_ns: int
) -> tuple[Ints, float]:
    """How far the clock is ahead at each end, drift included; and how far ends usually are from that."""
    matched = np.flatnonzero(pair >= 0)
    off_ns = (own.end_ns[matched] - known.end_ns[pair[matched]] - distance_ns).astype(np.float64)
    since_ns = (own.end_ns - own.end_ns[0]).astype(np.float64)
    slope, middle_ns, at_ns = 0.0, float(np.median(off_ns)), 0.0
    half = len(matched) // 2
    if half >= 4:  # a line through the medians of both halves
        early, late = matched[:half], matched[half:]
        at_ns = float(since_ns[early].mean())
        slope = (float(np.median(off_ns[half:])) - float(np.median(off_ns[:half]))) / max(
            float(since_ns[late].mean()) - at_ns, 1.0
        )
        middle_ns = float(np.median(off_ns[:half]))
    ahead_ns = middle_ns + slope * (since_ns - at_ns)
    usual_ns = 1.4826 * float(np.median(np.abs(off_ns - ahead_ns[matched])))
    return distance_ns + np.rint(ahead_ns).astype(np.int64), usual_ns


def _lost_share(known: CompletedCollectives, own: CompletedCollectives) -> float:
    """The share of collectives, in steps that both recorded, that only one of them has."""
    common = np.intersect1d(known.step, own.step)
    counts: defaultdict[tuple[int, int], int] = defaultdict(int)
    total = 0
    for ended, sign in ((known, 1), (own, -1)):
        within = np.isin(ended.step, common)
        total += int(within.sum())
        for kind in zip(ended.key[within].tolist(), ended.step[within].tolist(), strict=True):
            counts[kind] += sign
    return sum(map(abs, counts.values())) / max(total, 1)


def _fill(
    known: CompletedCollectives, own: CompletedCollectives, pair: Ints, moved_ns: Ints, most_ns: int
) -> None:
    """Pair, in place, what is left between pairs of one kind, where as many are left of either rank."""
    left = _left(own, pair >= 0), _left(known, np.isin(np.arange(len(known)), pair))
    for gap, mine in left[0].items():
        others = left[1].get(gap, [])
        if len(mine) == len(others):
            for one, other in zip(mine, others, strict=True):
                if abs(own.end_ns[one] - moved_ns[one] - known.end_ns[other]) <= most_ns:
                    pair[one] = other


def _left(ended: CompletedCollectives, matched: Flags) -> dict[tuple[int, int, int], list[int]]:
    """The indices of what has no partner, by kind, step, and how many of the kind before it have one."""
    found: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    before: defaultdict[int, int] = defaultdict(int)
    kinds = zip(ended.key.tolist(), ended.step.tolist(), matched.tolist(), strict=True)
    for index, (key, step, has) in enumerate(kinds):
        if has:
            before[key] += 1
        else:
            found[key, step, before[key]].append(index)
    return found
