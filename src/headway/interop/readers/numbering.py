"""Numbering collectives whose recordings do not number them, so that ranks' views of the same one are known to be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from headway.arrays import Flags, Indices, Ints
from headway.trace.events import Events, Kind


@dataclass(frozen=True, eq=False)
class CompletedCollectives:
    """One rank's collectives as columns, in the order of their ends. ``key`` tells kinds apart."""

    number: Ints
    key: Ints
    end_ns: Ints
    asked_ns: Ints
    step: Ints

    def __len__(self) -> int:
        return len(self.number)

    def where(self, picked: Flags | Indices) -> CompletedCollectives:
        """Those that ``picked`` picks."""
        return CompletedCollectives(
            **{field.name: getattr(self, field.name)[picked] for field in fields(self)}
        )

    def numbered(self, number: Ints) -> CompletedCollectives:
        """The same under other numbers."""
        return replace(self, number=number)

    def extended(self, other: CompletedCollectives, moved_ns: Ints) -> CompletedCollectives:
        """These and ``other``, whose clock is ahead by ``moved_ns``."""
        others = replace(other, end_ns=other.end_ns - moved_ns)
        joined = CompletedCollectives(
            **{
                field.name: np.concatenate([getattr(self, field.name), getattr(others, field.name)])
                for field in fields(self)
            }
        )
        return joined.where(np.argsort(joined.end_ns, kind="stable"))


def of_one_kind(known: CompletedCollectives, own: CompletedCollectives) -> Iterator[tuple[Indices, Indices]]:
    """The indices of those of each kind, of ``own`` and of ``known``, where both have some."""
    groups = []
    for ended in (own, known):
        order = np.argsort(ended.key, kind="stable")
        keys, first = np.unique(ended.key[order], return_index=True)
        groups.append(dict(zip(keys.tolist(), np.split(order, first[1:]), strict=True)) if len(keys) else {})
    for key, group in groups[0].items():
        if key in groups[1]:
            yield group, groups[1][key]


def nearest(known: CompletedCollectives, own: CompletedCollectives, moved_ns: Ints, most_ns: int) -> Ints:
    """For each of ``own`` the index of its partner in ``known``, or -1: those that end most closely together first."""
    heres, theres = [], []
    end_ns = own.end_ns - moved_ns
    for mine, others in of_one_kind(known, own):
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
    for mine, _ in of_one_kind(known, own):  # what ended first is what ended first
        matched = mine[pair[mine] >= 0]
        pair[matched] = np.sort(pair[matched])
    return pair


TOGETHER_NS = 2_000_000  # how far ends may be apart, drift of clocks over a recording included
FINEST_NS = 20_000  # what lies more closely together cannot be told apart
MOST_APART = (
    32  # collectives of one kind and step that one rank may have recorded before another's first, if not more
)
_WINDOWS_NS = (TOGETHER_NS, 600_000, 200_000, 60_000)  # within which distances may be one
_GUESSES = 4  # of the distance, a window
_SAMPLE, _PAIRS = (
    400,
    100_000,
)  # collectives of a rank from which its distance is told, and pairs that they may form


def distance_of_clocks_ns(known: CompletedCollectives, own: CompletedCollectives) -> int:
    """The distance at which the most collectives end together the most closely."""
    here, there = _candidates(known, own)
    apart_ns = own.end_ns[here] - known.end_ns[there]
    order = np.argsort(apart_ns)
    apart_ns, weight = apart_ns[order], _alike(own.step[here], known.step[there])[order]
    looked_at = own.where(np.unique(here))
    best, distance_ns = -1.0, 0
    for guess_ns in {one for window_ns in _WINDOWS_NS for one in _commonest(apart_ns, weight, window_ns)}:
        pair = nearest(known, looked_at, np.full(len(looked_at), guess_ns), TOGETHER_NS)
        matched = np.flatnonzero(pair >= 0)
        off_ns = np.abs(looked_at.end_ns[matched] - guess_ns - known.end_ns[pair[matched]])
        # How much likelier each is at the right distance than at any.
        likelier = np.log(TOGETHER_NS / np.clip(off_ns, FINEST_NS, TOGETHER_NS))
        likely = float((likelier * _alike(looked_at.step[matched], known.step[pair[matched]])).sum())
        if likely > best:
            best, distance_ns = likely, guess_ns
    return distance_ns


def _alike(step: Ints, other: Ints) -> npt.NDArray[np.float64]:
    """How much pairs of two steps count: steps are numbered alike, but for what lies on their borders."""
    return np.where(step == other, 1.0, 0.6)


def _commonest(apart_ns: Ints, weight: npt.NDArray[np.float64], window_ns: int) -> list[int]:
    """The middles of the windows that hold the most of the sorted ``apart_ns``, the first few that do not overlap."""
    total = np.concatenate([[0.0], np.cumsum(weight)])
    reach = np.searchsorted(apart_ns, apart_ns + window_ns, side="right")
    within = total[reach] - total[:-1]
    found: list[int] = []
    while len(found) < _GUESSES and within.any():
        begin = int(np.argmax(within))
        found.append(int(np.median(apart_ns[begin : reach[begin]])))
        within[np.abs(apart_ns - apart_ns[begin]) <= window_ns] = 0
    return found


def _candidates(known: CompletedCollectives, own: CompletedCollectives) -> tuple[Indices, Indices]:
    """Pairs of one kind that may be the same collective: about as far on in the same step, or in a neighbouring one.

    ``own`` is a sample where there are many.
    """
    heres, theres = [], []
    every = -(-len(own) // _SAMPLE)
    most = max(MOST_APART, _PAIRS // (2 * min(len(own), _SAMPLE)))
    for mine, others in of_one_kind(known, own):
        looked_at = _sample(own.step[mine], every)
        place = _places_in(known.step[others], own.step[mine])[looked_at]
        apart = min(most, len(others) + len(mine))
        column = place[:, None] + np.arange(-apart, apart + 1)
        row, at = np.nonzero((column >= 0) & (column < len(others)))
        heres.append(mine[looked_at[row]])
        theres.append(others[column[row, at]])
    here, there = (
        np.concatenate(parts) if parts else np.zeros(0, dtype=np.intp) for parts in (heres, theres)
    )
    near = np.abs(own.step[here] - known.step[there]) <= 1
    return here[near], there[near]


def _sample(step: Ints, every: int) -> Indices:
    """One or two of ``every`` places: where steps begin and end, which tells a collective from the next; and others."""
    ends = np.flatnonzero(np.diff(step, prepend=step[0] - 1, append=step[-1] + 1))
    borders = np.unique(np.concatenate([ends[:-1], ends[1:] - 1]))
    thin = -(-len(borders) * every // len(step)) | 1  # not only beginnings, nor only ends
    return np.union1d(borders[::thin], np.arange(0, len(step), every))


def _places_in(theirs: Ints, mine: Ints) -> Indices:
    """For each of ``mine`` the place among ``theirs`` of what is as manieth in its step; steps are in order, mostly."""
    their_steps, their_first = np.unique(theirs, return_index=True)
    my_steps, my_first = np.unique(mine, return_index=True)
    begins = np.append(their_first, len(theirs))[np.searchsorted(their_steps, my_steps)]
    return (np.arange(len(mine)) + (begins - my_first)[np.searchsorted(my_steps, mine)]).astype(np.intp)


LEAST_PAIRS, LEAST_SHARE = 3, 0.3  # of ends that have to agree
_TAIL = 6.0  # how many times the usual ends may be apart
_LATE_NS = 50_000_000  # how far they may be apart if nothing was lost, so that order tells which is which
_LOSSLESS, _MANY = 0.02, 0.1  # shares of collectives that are lost: none, as it were; too many to go by order


# Which of two ranks' collectives are the same, told by where they end together.
#
# Order alone would do if both had recorded the same collectives, which they have not: they begin at different ones, and
# profilers lose some. But members of a collective end together. Of all distances between two ranks' clocks, the one
# at which most of their collectives end together is right, however far the clocks are apart.


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


_OWN_SIZES = ("all_to_all", "all_gather", "send_receive", "broadcast")  # ranks may well state different sizes

Keys = dict[tuple[str, str, int], int]
"""Numbers for kinds of collectives: by group, name and size."""


def number_collectives(events: Mapping[int, Events]) -> list[str]:
    """Give the collectives of ``events`` that have no sequence one, in place. Returns what has to be said of it."""
    notes = _take_over(events)
    keys: Keys = {}
    views = {rank: _view(event, keys, _unnumbered(event)) for rank, event in events.items()}
    first = max(views, key=lambda rank: len(views[rank]))
    if not len(views[first]):
        return notes
    stated = max(int(own.sequence.max(initial=-1)) for own in events.values()) + 1
    # What is known of the job: what the first rank recorded, and what only others did, on the first one's clock.
    known = views[first].numbered(np.argsort(np.argsort(views[first].asked_ns, kind="stable")))
    of_first, count = known, len(known)
    events[first].sequence[views[first].number] = stated + of_first.number
    unsure, lost = [], 0
    for rank, view in views.items():
        if rank == first or not len(view):
            continue
        numbers, moved_ns = paired(known, view)
        if moved_ns is None:
            unsure.append(rank)
            numbers = same_order(of_first, view)
        alone = numbers < 0
        lost += int((alone | (numbers >= len(of_first))).sum())
        numbers[alone] = count + np.arange(int(alone.sum()))
        count += int(alone.sum())
        if moved_ns is not None:
            known = known.extended(view.numbered(numbers).where(alone), moved_ns[alone])
        events[rank].sequence[view.number] = stated + numbers
    return [*notes, *(_notes(first, unsure, lost) if len(events) > 1 and not notes else [])]


def _take_over(events: Mapping[int, Events]) -> list[str]:
    """Have ranks that number no collective take numbers and groups from the rank that numbers most, if one does."""
    numbered = {
        rank: (event.kind == Kind.COLLECTIVE) & (event.sequence >= 0) for rank, event in events.items()
    }
    first = max(events, key=lambda rank: int(numbered[rank].sum()))
    bare = [rank for rank, own in events.items() if not numbered[rank].any() and _unnumbered(own).any()]
    if not bare or not numbered[first].any():
        return []
    keys: Keys = {}
    known = _view(events[first], keys, numbered[first], grouped=False)
    for rank in bare:
        own = events[rank]
        view = _view(own, keys, _unnumbered(own), grouped=False)
        rows, _ = paired(known, view)
        found = rows >= 0
        own.sequence[view.number[found]] = events[first].sequence[rows[found]]
        own.group[view.number[found]] = events[first].group[rows[found]]
    shown = ", ".join(map(str, bare[:4])) + (" and more" if len(bare) > 4 else "")
    return [
        f"The collectives of rank {shown} are not numbered: those that end with rank {first}'s are taken for the same."
    ]


def _notes(first: int, unsure: list[int], lost: int) -> list[str]:
    notes = [
        "Collectives have no sequence numbers: those of different ranks were matched by where they end together."
    ]
    if unsure:
        shown = ", ".join(map(str, unsure[:4]))
        notes.append(
            f"Too few collectives of rank {shown} end together with those of another rank: they were matched by order."
        )
    elif lost:
        are = "1 collective has" if lost == 1 else f"{lost} collectives have"
        notes.append(f"{are} no counterpart on rank {first}.")
    return notes


def _unnumbered(own: Events) -> npt.NDArray[np.bool_]:
    unnumbered: npt.NDArray[np.bool_] = (own.kind == Kind.COLLECTIVE) & (own.sequence < 0)
    return unnumbered


def _view(
    own: Events, keys: Keys, picked: npt.NDArray[np.bool_], *, grouped: bool = True
) -> CompletedCollectives:
    """The collectives of one rank that ``picked`` picks. What numbers them here are their rows."""
    rows: Ints = np.flatnonzero(picked).astype(np.int64)
    rows = rows[np.argsort(own.end_ns[rows], kind="stable")]
    described = zip(
        own.group[rows].tolist(), own.name[rows].tolist(), own.size_bytes[rows].tolist(), strict=True
    )
    key = [
        keys.setdefault((group if grouped else "", name, -1 if name in _OWN_SIZES else size_bytes), len(keys))
        for group, name, size_bytes in described
    ]
    asked_ns = np.where(own.enqueue_ns[rows] >= 0, own.enqueue_ns[rows], own.start_ns[rows])
    return CompletedCollectives(
        rows, np.array(key, dtype=np.int64), own.end_ns[rows], asked_ns, own.step[rows]
    )
