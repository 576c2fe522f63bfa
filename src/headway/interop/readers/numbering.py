"""Numbers collectives whose recordings lack sequence numbers, so that they can be matched across ranks.

Order alone does not match them: recordings begin at different collectives, and profilers lose some. But the members
of a collective end together, so the right offset between two ranks' clocks is the one at which most of their
collectives end together, however far apart the clocks are.
"""

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
    """One rank's collectives as columns, ordered by end. ``key`` numbers their kinds (group, name and size)."""

    number: Ints
    key: Ints
    end_ns: Ints
    asked_ns: Ints
    step: Ints

    def __len__(self) -> int:
        return len(self.number)

    def where(self, picked: Flags | Indices) -> CompletedCollectives:
        """The selected rows."""
        return CompletedCollectives(
            **{field.name: getattr(self, field.name)[picked] for field in fields(self)}
        )

    def numbered(self, number: Ints) -> CompletedCollectives:
        """The same collectives under other numbers."""
        return replace(self, number=number)

    def extended(self, more: CompletedCollectives, moved_ns: Ints) -> CompletedCollectives:
        """These and ``more``, whose clock is ahead by ``moved_ns``, ordered by end."""
        shifted = replace(more, end_ns=more.end_ns - moved_ns)
        joined = CompletedCollectives(
            **{
                field.name: np.concatenate([getattr(self, field.name), getattr(shifted, field.name)])
                for field in fields(self)
            }
        )
        return joined.where(np.argsort(joined.end_ns, kind="stable"))


def of_one_kind(
    reference: CompletedCollectives, view: CompletedCollectives
) -> Iterator[tuple[Indices, Indices]]:
    """Yield, for each kind that both have, its row indices in ``view`` and in ``reference``."""
    groups = []
    for ended in (view, reference):
        order = np.argsort(ended.key, kind="stable")
        keys, first = np.unique(ended.key[order], return_index=True)
        groups.append(dict(zip(keys.tolist(), np.split(order, first[1:]), strict=True)) if len(keys) else {})
    for key, group in groups[0].items():
        if key in groups[1]:
            yield group, groups[1][key]


def nearest(
    reference: CompletedCollectives, view: CompletedCollectives, moved_ns: Ints, most_ns: int
) -> Ints:
    """The index in ``reference`` of each ``view`` row's partner, or -1; the closest ends are paired first."""
    heres, theres = [], []
    end_ns = view.end_ns - moved_ns
    for view_rows, reference_rows in of_one_kind(reference, view):
        place = np.searchsorted(reference.end_ns[reference_rows], end_ns[view_rows])
        for shift in (-2, -1, 0, 1):
            some = (place + shift >= 0) & (place + shift < len(reference_rows))
            heres.append(view_rows[some])
            theres.append(reference_rows[(place + shift)[some]])
    pair = np.full(len(view), -1, dtype=np.int64)
    if not heres:
        return pair
    here, there = np.concatenate(heres), np.concatenate(theres)
    off_ns = np.abs(end_ns[here] - reference.end_ns[there])
    near = np.flatnonzero(off_ns <= most_ns)
    near = near[np.argsort(off_ns[near], kind="stable")]
    taken = np.zeros(len(reference), dtype=bool)
    for row, partner in zip(here[near].tolist(), there[near].tolist(), strict=True):
        if pair[row] < 0 and not taken[partner]:
            pair[row] = partner
            taken[partner] = True
    for view_rows, _ in of_one_kind(reference, view):  # partners of one kind keep their order
        matched = view_rows[pair[view_rows] >= 0]
        pair[matched] = np.sort(pair[matched])
    return pair


TOGETHER_NS = 2_000_000  # largest distance of matching ends, clock drift over a recording included
FINEST_NS = 20_000  # smaller distances count as equal
MOST_APART = 32  # collectives of one kind and step that a rank may record before another's first, at least
_WINDOWS_NS = (TOGETHER_NS, 600_000, 200_000, 60_000)  # widths in which distances are clustered
_GUESSES = 4  # candidate distances per window
_SAMPLE, _PAIRS = (
    400,
    100_000,
)  # most collectives of a rank to estimate its distance from, and most pairs of them


def distance_of_clocks_ns(reference: CompletedCollectives, view: CompletedCollectives) -> int:
    """Estimate how far ``view``'s clock is ahead: the shift at which most collectives end together, most closely."""
    here, there = _candidates(reference, view)
    apart_ns = view.end_ns[here] - reference.end_ns[there]
    order = np.argsort(apart_ns)
    apart_ns, weight = apart_ns[order], _alike(view.step[here], reference.step[there])[order]
    looked_at = view.where(np.unique(here))
    best, distance_ns = -1.0, 0
    for guess_ns in {
        near_ns for window_ns in _WINDOWS_NS for near_ns in _commonest(apart_ns, weight, window_ns)
    }:
        pair = nearest(reference, looked_at, np.full(len(looked_at), guess_ns), TOGETHER_NS)
        matched = np.flatnonzero(pair >= 0)
        off_ns = np.abs(looked_at.end_ns[matched] - guess_ns - reference.end_ns[pair[matched]])
        # Log-likelihood ratio of each pair: right distance against any.
        likelier = np.log(TOGETHER_NS / np.clip(off_ns, FINEST_NS, TOGETHER_NS))
        likely = float((likelier * _alike(looked_at.step[matched], reference.step[pair[matched]])).sum())
        if likely > best:
            best, distance_ns = likely, guess_ns
    return distance_ns


def _alike(step: Ints, partner_step: Ints) -> npt.NDArray[np.float64]:
    """The weight of pairs by their steps: ranks agree on a collective's step, except at borders of steps."""
    return np.where(step == partner_step, 1.0, 0.6)


def _commonest(apart_ns: Ints, weight: npt.NDArray[np.float64], window_ns: int) -> list[int]:
    """The medians of the heaviest windows of the sorted ``apart_ns``: up to _GUESSES that do not overlap."""
    total = np.concatenate([[0.0], np.cumsum(weight)])
    reach = np.searchsorted(apart_ns, apart_ns + window_ns, side="right")
    within = total[reach] - total[:-1]
    middles: list[int] = []
    while len(middles) < _GUESSES and within.any():
        begin = int(np.argmax(within))
        middles.append(int(np.median(apart_ns[begin : reach[begin]])))
        within[np.abs(apart_ns - apart_ns[begin]) <= window_ns] = 0
    return middles


def _candidates(reference: CompletedCollectives, view: CompletedCollectives) -> tuple[Indices, Indices]:
    """Pairs of one kind that may be the same collective: at about the same place of the same or a neighbouring step.

    A large ``view`` is sampled.
    """
    heres, theres = [], []
    every = -(-len(view) // _SAMPLE)
    most = max(MOST_APART, _PAIRS // (2 * min(len(view), _SAMPLE)))
    for view_rows, reference_rows in of_one_kind(reference, view):
        looked_at = _sample(view.step[view_rows], every)
        place = _places_in(reference.step[reference_rows], view.step[view_rows])[looked_at]
        apart = min(most, len(reference_rows) + len(view_rows))
        column = place[:, None] + np.arange(-apart, apart + 1)
        row, at = np.nonzero((column >= 0) & (column < len(reference_rows)))
        heres.append(view_rows[looked_at[row]])
        theres.append(reference_rows[column[row, at]])
    here, there = (
        np.concatenate(parts) if parts else np.zeros(0, dtype=np.intp) for parts in (heres, theres)
    )
    near = np.abs(view.step[here] - reference.step[there]) <= 1
    return here[near], there[near]


def _sample(step: Ints, every: int) -> Indices:
    """Sample one or two of ``every`` rows: some at borders of steps, which distinguish best, and some between."""
    ends = np.flatnonzero(np.diff(step, prepend=step[0] - 1, append=step[-1] + 1))
    borders = np.unique(np.concatenate([ends[:-1], ends[1:] - 1]))
    thin = -(-len(borders) * every // len(step)) | 1  # odd, so that beginnings and ends are both sampled
    return np.union1d(borders[::thin], np.arange(0, len(step), every))


def _places_in(reference_steps: Ints, view_steps: Ints) -> Indices:
    """The index in ``reference_steps`` of the row with the same ordinal in its step, for each ``view`` row."""
    reference_numbers, reference_first = np.unique(reference_steps, return_index=True)
    view_numbers, view_first = np.unique(view_steps, return_index=True)
    begins = np.append(reference_first, len(reference_steps))[
        np.searchsorted(reference_numbers, view_numbers)
    ]
    return (
        np.arange(len(view_steps)) + (begins - view_first)[np.searchsorted(view_numbers, view_steps)]
    ).astype(np.intp)


LEAST_PAIRS, LEAST_SHARE = 3, 0.3  # number and share of collectives that have to end together
_TAIL = 6.0  # largest distance of matching ends, in usual distances
_LATE_NS = 50_000_000  # the same if nothing was lost, so that order identifies collectives
_LOSSLESS, _MANY = 0.02, 0.1  # shares of lost collectives: practically none; too many to rely on order


def paired(reference: CompletedCollectives, view: CompletedCollectives) -> tuple[Ints, Ints | None]:
    """The number of each ``view`` row's counterpart in ``reference``, or -1; and how far its clock is ahead.

    The latter (ns, one per row) is None if too few collectives end together.
    """
    distance_ns = distance_of_clocks_ns(reference, view)
    moved_ns = np.full(len(view), distance_ns, dtype=np.int64)
    pair = nearest(reference, view, moved_ns, TOGETHER_NS)
    fewest = min(len(reference), len(view))
    if (pair >= 0).sum() < max(min(LEAST_PAIRS, fewest), LEAST_SHARE * fewest):
        return np.full(len(view), -1, dtype=np.int64), None
    moved_ns, usual_ns = _line(reference, view, pair, distance_ns)
    near_ns = min(TOGETHER_NS, max(FINEST_NS, round(_TAIL * usual_ns)))
    pair = nearest(reference, view, moved_ns, near_ns)
    lost = _lost_share(reference, view)
    if lost <= _MANY:
        late_ns = _LATE_NS if lost <= _LOSSLESS else min(TOGETHER_NS, round(_TAIL * near_ns))
        _fill(reference, view, pair, moved_ns, late_ns)
    return np.where(pair >= 0, reference.number[pair], -1), moved_ns


def same_order(reference: CompletedCollectives, view: CompletedCollectives) -> Ints:
    """The number of the ``reference`` row with the same kind, step and ordinal, for each ``view`` row; or -1."""
    place = dict(zip(_places(reference), reference.number.tolist(), strict=True))
    return np.array([place.get(key, -1) for key in _places(view)], dtype=np.int64)


def _places(ended: CompletedCollectives) -> list[tuple[int, int, int]]:
    counted: dict[tuple[int, int], int] = {}
    places = [(0, 0, 0)] * len(ended)
    for index in np.argsort(ended.asked_ns, kind="stable").tolist():
        kind = int(ended.key[index]), int(ended.step[index])
        counted[kind] = counted.get(kind, -1) + 1
        places[index] = (*kind, counted[kind])
    return places


def _line(
    reference: CompletedCollectives, view: CompletedCollectives, pair: Ints, distance_ns: int
) -> tuple[Ints, float]:
    """Fit how far the clock is ahead at each end, with drift; also the usual residual (scaled median deviation)."""
    matched = np.flatnonzero(pair >= 0)
    off_ns = (view.end_ns[matched] - reference.end_ns[pair[matched]] - distance_ns).astype(np.float64)
    since_ns = (view.end_ns - view.end_ns[0]).astype(np.float64)
    slope, middle_ns, at_ns = 0.0, float(np.median(off_ns)), 0.0
    half = len(matched) // 2
    if half >= 4:  # fit a line through the medians of both halves
        early, late = matched[:half], matched[half:]
        at_ns = float(since_ns[early].mean())
        slope = (float(np.median(off_ns[half:])) - float(np.median(off_ns[:half]))) / max(
            float(since_ns[late].mean()) - at_ns, 1.0
        )
        middle_ns = float(np.median(off_ns[:half]))
    ahead_ns = middle_ns + slope * (since_ns - at_ns)
    usual_ns = 1.4826 * float(np.median(np.abs(off_ns - ahead_ns[matched])))
    return distance_ns + np.rint(ahead_ns).astype(np.int64), usual_ns


def _lost_share(reference: CompletedCollectives, view: CompletedCollectives) -> float:
    """The share of collectives that only one of the two has, in the steps that both recorded."""
    common = np.intersect1d(reference.step, view.step)
    counts: defaultdict[tuple[int, int], int] = defaultdict(int)
    total = 0
    for ended, sign in ((reference, 1), (view, -1)):
        within = np.isin(ended.step, common)
        total += int(within.sum())
        for kind in zip(ended.key[within].tolist(), ended.step[within].tolist(), strict=True):
            counts[kind] += sign
    return sum(map(abs, counts.values())) / max(total, 1)


def _fill(
    reference: CompletedCollectives, view: CompletedCollectives, pair: Ints, moved_ns: Ints, most_ns: int
) -> None:
    """Pair, in place, the rest between neighbouring pairs of a kind, if both ranks have equally many there."""
    left = _left(view, pair >= 0), _left(reference, np.isin(np.arange(len(reference)), pair))
    for gap, view_rows in left[0].items():
        reference_rows = left[1].get(gap, [])
        if len(view_rows) == len(reference_rows):
            for row, partner in zip(view_rows, reference_rows, strict=True):
                if abs(view.end_ns[row] - moved_ns[row] - reference.end_ns[partner]) <= most_ns:
                    pair[row] = partner


def _left(ended: CompletedCollectives, matched: Flags) -> dict[tuple[int, int, int], list[int]]:
    """Indices of unmatched rows by kind, step, and number of matched rows of the kind before them."""
    unmatched: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    before: defaultdict[int, int] = defaultdict(int)
    kinds = zip(ended.key.tolist(), ended.step.tolist(), matched.tolist(), strict=True)
    for index, (key, step, has) in enumerate(kinds):
        if has:
            before[key] += 1
        else:
            unmatched[key, step, before[key]].append(index)
    return unmatched


_UNEQUAL_SIZES = (
    "all_to_all",
    "all_gather",
    "send_receive",
    "broadcast",
)  # recorded sizes may differ by rank

Keys = dict[tuple[str, str, int], int]
"""The number of each kind of collective: group, name and size."""


def number_collectives(events: Mapping[int, Events]) -> list[str]:
    """Assign sequence numbers to collectives without one, in place; returns notes for the user."""
    notes = _take_over(events)
    keys: Keys = {}
    views = {rank: _view(event, keys, _unnumbered(event)) for rank, event in events.items()}
    first = max(views, key=lambda rank: len(views[rank]))
    if not len(views[first]):
        return notes
    stated = max(int(rank_events.sequence.max(initial=-1)) for rank_events in events.values()) + 1
    # All collectives of the job so far, on the first rank's clock: its own, and those that only other ranks recorded.
    reference = views[first].numbered(np.argsort(np.argsort(views[first].asked_ns, kind="stable")))
    of_first, count = reference, len(reference)
    events[first].sequence[views[first].number] = stated + of_first.number
    unsure, lost = [], 0
    for rank, view in views.items():
        if rank == first or not len(view):
            continue
        numbers, moved_ns = paired(reference, view)
        if moved_ns is None:
            unsure.append(rank)
            numbers = same_order(of_first, view)
        alone = numbers < 0
        lost += int((alone | (numbers >= len(of_first))).sum())
        numbers[alone] = count + np.arange(int(alone.sum()))
        count += int(alone.sum())
        if moved_ns is not None:
            reference = reference.extended(view.numbered(numbers).where(alone), moved_ns[alone])
        events[rank].sequence[view.number] = stated + numbers
    return [*notes, *(_notes(first, unsure, lost) if len(events) > 1 and not notes else [])]


def _take_over(events: Mapping[int, Events]) -> list[str]:
    """Copy numbers and groups to ranks that number no collective, from the rank that numbers most."""
    numbered = {
        rank: (event.kind == Kind.COLLECTIVE) & (event.sequence >= 0) for rank, event in events.items()
    }
    first = max(events, key=lambda rank: int(numbered[rank].sum()))
    bare = [
        rank
        for rank, rank_events in events.items()
        if not numbered[rank].any() and _unnumbered(rank_events).any()
    ]
    if not bare or not numbered[first].any():
        return []
    keys: Keys = {}
    reference = _view(events[first], keys, numbered[first], grouped=False)
    for rank in bare:
        rank_events = events[rank]
        view = _view(rank_events, keys, _unnumbered(rank_events), grouped=False)
        rows, _ = paired(reference, view)
        matched = rows >= 0
        rank_events.sequence[view.number[matched]] = events[first].sequence[rows[matched]]
        rank_events.group[view.number[matched]] = events[first].group[rows[matched]]
    shown = ", ".join(map(str, bare[:4])) + (" and more" if len(bare) > 4 else "")
    return [
        f"Rank {shown} has no sequence numbers: its collectives were matched to rank {first}'s by their ends."
    ]


def _notes(first: int, unsure: list[int], lost: int) -> list[str]:
    notes = ["Collectives have no sequence numbers: they were matched across ranks by common ends."]
    if unsure:
        shown = ", ".join(map(str, unsure[:4]))
        notes.append(
            f"Too few collectives of rank {shown} end together with another rank's: they were matched by order."
        )
    elif lost:
        are = "1 collective has" if lost == 1 else f"{lost} collectives have"
        notes.append(f"{are} no counterpart on rank {first}.")
    return notes


def _unnumbered(events: Events) -> npt.NDArray[np.bool_]:
    unnumbered: npt.NDArray[np.bool_] = (events.kind == Kind.COLLECTIVE) & (events.sequence < 0)
    return unnumbered


def _view(
    events: Events, keys: Keys, picked: npt.NDArray[np.bool_], *, grouped: bool = True
) -> CompletedCollectives:
    """The ``picked`` collectives of one rank, numbered by their rows."""
    rows: Ints = np.flatnonzero(picked).astype(np.int64)
    rows = rows[np.argsort(events.end_ns[rows], kind="stable")]
    described = zip(
        events.group[rows].tolist(), events.name[rows].tolist(), events.size_bytes[rows].tolist(), strict=True
    )
    key = [
        keys.setdefault(
            (group if grouped else "", name, -1 if name in _UNEQUAL_SIZES else size_bytes), len(keys)
        )
        for group, name, size_bytes in described
    ]
    asked_ns = np.where(events.enqueue_ns[rows] >= 0, events.enqueue_ns[rows], events.start_ns[rows])
    return CompletedCollectives(
        rows, np.array(key, dtype=np.int64), events.end_ns[rows], asked_ns, events.step[rows]
    )
