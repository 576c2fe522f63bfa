"""Which of two ranks' collectives are the same, told by where they end together.

Order alone would do if both had recorded the same collectives, which they have not: they begin at different ones, and
profilers lose some. But members of a collective end together. Of all distances between two ranks' clocks, the one
at which most of their collectives end together is right, however far the clocks are apart.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from headway.trace.events import Ints

MOST_APART = 32  # collectives of one kind that one rank may have recorded before another's first
TOGETHER_NS = 2_000_000  # how far ends may be apart, drift of clocks over a recording included
LEAST_PAIRS, LEAST_SHARE = 3, 0.3  # of ends that have to agree
_WINDOWS_NS = (TOGETHER_NS, 600_000, 200_000, 60_000)  # within which distances may be one
_GUESSES = 4  # of the distance, a window
_SAMPLE = 1_000  # collectives of a rank from which its distance is told
_FINEST_NS = 20_000  # what lies more closely together cannot be told apart
_TAIL = 6.0  # how many times the usual ends may be apart
_LATE_NS = 50_000_000  # how far they may be apart if nothing was lost, so that order tells which is which
_LOSSLESS, _MANY = 0.02, 0.1  # shares of collectives that are lost: none, as it were; too many to go by order

Flags = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Ended:
    """One rank's collectives as columns, in the order of their ends. ``key`` tells kinds apart."""

    number: Ints
    key: Ints
    end_ns: Ints
    asked_ns: Ints
    step: Ints

    def __len__(self) -> int:
        return len(self.number)

    def where(self, picked: Flags | Indices) -> Ended:
        """Those that ``picked`` picks."""
        return Ended(**{field.name: getattr(self, field.name)[picked] for field in fields(self)})

    def numbered(self, number: Ints) -> Ended:
        """The same under other numbers."""
        return replace(self, number=number)

    def extended(self, other: Ended, moved_ns: Ints) -> Ended:
        """These and ``other``, whose clock is ahead by ``moved_ns``."""
        others = replace(other, end_ns=other.end_ns - moved_ns)
        joined = Ended(
            **{
                field.name: np.concatenate([getattr(self, field.name), getattr(others, field.name)])
                for field in fields(self)
            }
        )
        return joined.where(np.argsort(joined.end_ns, kind="stable"))


def paired(known: Ended, own: Ended) -> tuple[Ints, Ints | None]:
    """For each of ``own`` the number of the one in ``known`` that is the same, or -1; and how far its clock is ahead.

    That is None where too few end together.
    """
    distance_ns = _distance_ns(known, own)
    moved_ns = np.full(len(own), distance_ns, dtype=np.int64)
    pair = _nearest(known, own, moved_ns, TOGETHER_NS)
    fewest = min(len(known), len(own))
    if (pair >= 0).sum() < max(min(LEAST_PAIRS, fewest), LEAST_SHARE * fewest):
        return np.full(len(own), -1, dtype=np.int64), None
    moved_ns, usual_ns = _line(known, own, pair, distance_ns)
    near_ns = min(TOGETHER_NS, max(_FINEST_NS, round(_TAIL * usual_ns)))
    pair = _nearest(known, own, moved_ns, near_ns)
    lost = _lost_share(known, own)
    if lost <= _MANY:
        late_ns = _LATE_NS if lost <= _LOSSLESS else min(TOGETHER_NS, round(_TAIL * near_ns))
        _fill(known, own, pair, moved_ns, late_ns)
    return np.where(pair >= 0, known.number[pair], -1), moved_ns


def same_order(known: Ended, own: Ended) -> Ints:
    """For each of ``own`` the number of that in ``known`` which is as manieth of its kind in its step, or -1."""
    place = dict(zip(_places(known), known.number.tolist(), strict=True))
    return np.array([place.get(one, -1) for one in _places(own)], dtype=np.int64)


def _places(ended: Ended) -> list[tuple[int, int, int]]:
    counted: dict[tuple[int, int], int] = {}
    places = [(0, 0, 0)] * len(ended)
    for index in np.argsort(ended.asked_ns, kind="stable").tolist():
        kind = int(ended.key[index]), int(ended.step[index])
        counted[kind] = counted.get(kind, -1) + 1
        places[index] = (*kind, counted[kind])
    return places


def _distance_ns(known: Ended, own: Ended) -> int:
    """The distance at which the most collectives end together the most closely."""
    here, there = _candidates(known, own)
    apart_ns = np.sort(own.end_ns[here] - known.end_ns[there])
    looked_at = own.where(np.unique(here))
    best, distance_ns = -1.0, 0
    for guess_ns in {one for window_ns in _WINDOWS_NS for one in _commonest(apart_ns, window_ns)}:
        pair = _nearest(known, looked_at, np.full(len(looked_at), guess_ns), TOGETHER_NS)
        matched = np.flatnonzero(pair >= 0)
        off_ns = np.abs(looked_at.end_ns[matched] - guess_ns - known.end_ns[pair[matched]])
        # How much likelier each is at the right distance than at any: steps are numbered alike, too.
        likelier = np.log(TOGETHER_NS / np.clip(off_ns, _FINEST_NS, TOGETHER_NS))
        likely = float(
            (likelier * np.where(looked_at.step[matched] == known.step[pair[matched]], 1.0, 0.6)).sum()
        )
        if likely > best:
            best, distance_ns = likely, guess_ns
    return distance_ns


def _commonest(apart_ns: Ints, window_ns: int) -> list[int]:
    """The middles of the windows that hold the most of the sorted ``apart_ns``, the first few that do not overlap."""
    within = np.searchsorted(apart_ns, apart_ns + window_ns, side="right") - np.arange(len(apart_ns))
    found: list[int] = []
    while len(found) < _GUESSES and within.any():
        begin = int(np.argmax(within))
        found.append(int(np.median(apart_ns[begin : begin + within[begin]])))
        within[np.abs(apart_ns - apart_ns[begin]) <= window_ns] = 0
    return found


def _candidates(known: Ended, own: Ended) -> tuple[Indices, Indices]:
    """Pairs of one kind that may be the same collective: about as manieth of their kind, in about the same step."""
    heres, theres = [], []
    every = -(-len(own) // _SAMPLE)
    for key in np.intersect1d(known.key, own.key).tolist():
        mine, others = np.flatnonzero(own.key == key), np.flatnonzero(known.key == key)
        looked_at = np.arange(0, len(mine), every)
        place = looked_at[:, None] + np.arange(-MOST_APART, MOST_APART + 1)
        row, column = np.nonzero((place >= 0) & (place < len(others)))
        heres.append(mine[looked_at[row]])
        theres.append(others[place[row, column]])
    here, there = (
        np.concatenate(parts) if parts else np.zeros(0, dtype=np.intp) for parts in (heres, theres)
    )
    near = np.abs(own.step[here] - known.step[there]) <= 1
    return here[near], there[near]


def _nearest(known: Ended, own: Ended, moved_ns: Ints, most_ns: int) -> Ints:
    """For each of ``own`` the index of its partner in ``known``, or -1: those that end most closely together first."""
    heres, theres = [], []
    end_ns = own.end_ns - moved_ns
    for key in np.intersect1d(known.key, own.key).tolist():
        mine, others = np.flatnonzero(own.key == key), np.flatnonzero(known.key == key)
        place = np.searchsorted(known.end_ns[others], end_ns[mine])
        for shift in (-2, -1, 0, 1):
            some = (place + shift >= 0) & (place + shift < len(others))
            heres.append(mine[some])
            theres.append(others[(place + shift)[some]])
    pair = np.full(len(own), -1, dtype=np.int64)
    if not heres:
        return pair
    here, there = np.concatenate(heres), np.concatenate(theres)
    off_ns = np.abs(end_ns[here] - known.end_ns[there])
    near = np.flatnonzero(off_ns <= most_ns)
    near = near[np.argsort(off_ns[near], kind="stable")]
    taken = np.zeros(len(known), dtype=bool)
    for one, other in zip(here[near].tolist(), there[near].tolist(), strict=True):
        if pair[one] < 0 and not taken[other]:
            pair[one] = other
            taken[other] = True
    for key in np.unique(own.key).tolist():  # what ended first is what ended first
        matched = np.flatnonzero((own.key == key) & (pair >= 0))
        pair[matched] = np.sort(pair[matched])
    return pair


def _line(known: Ended, own: Ended, pair: Ints, distance_ns: int) -> tuple[Ints, float]:
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


def _lost_share(known: Ended, own: Ended) -> float:
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


def _fill(known: Ended, own: Ended, pair: Ints, moved_ns: Ints, most_ns: int) -> None:
    """Pair, in place, what is left between pairs of one kind, where as many are left of either rank."""
    left = _left(own, pair >= 0), _left(known, np.isin(np.arange(len(known)), pair))
    for gap, mine in left[0].items():
        others = left[1].get(gap, [])
        if len(mine) == len(others):
            for one, other in zip(mine, others, strict=True):
                if abs(own.end_ns[one] - moved_ns[one] - known.end_ns[other]) <= most_ns:
                    pair[one] = other


def _left(ended: Ended, matched: Flags) -> dict[tuple[int, int, int], list[int]]:
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
