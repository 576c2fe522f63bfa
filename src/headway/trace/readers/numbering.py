"""Numbering collectives whose recordings do not number them, so that ranks' views of the same one are known to be.

Order alone would do if all ranks recorded the same collectives, which they do not: they begin at different ones, and
profilers lose some. But members of a collective end together. Of all distances between two ranks' clocks, the one
at which most of their collectives end together is right, however far the clocks are apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.trace.events import Events, Ints, Kind

MOST_APART = 32  # collectives of one kind that one rank may have recorded before another's first
TOGETHER_NS = 2_000_000  # how far ends may be apart, drift of clocks over a recording included
LEAST_PAIRS, LEAST_SHARE = 3, 0.3  # of ends that have to agree
_OWN_SIZES = ("all_to_all", "all_gather", "send_receive", "broadcast")  # ranks may well state different sizes
_UNMATCHED = 1 << 40

Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class _View:
    """One rank's unnumbered collectives, in the order in which they were asked for. ``key`` tells kinds apart."""

    rows: Indices
    key: Ints
    end_ns: Ints
    step: Ints


def number_collectives(events: Mapping[int, Events]) -> list[str]:
    """Give the collectives of ``events`` that have no sequence one, in place. Returns what has to be said of it."""
    keys: dict[tuple[object, ...], int] = {}
    views = {rank: _view(own, keys) for rank, own in events.items()}
    first = max(views, key=lambda rank: len(views[rank].rows))
    if not len(views[first].rows):
        return []
    events[first].sequence[views[first].rows] = np.arange(len(views[first].rows))
    unsure, lost = [], 0
    for rank, view in views.items():
        if rank == first or not len(view.rows):
            continue
        match, sure = _matched(views[first], view)
        if not sure:
            unsure.append(rank)
        lost += int((match < 0).sum())
        alone = _UNMATCHED + rank * _UNMATCHED + np.arange(len(match))
        events[rank].sequence[view.rows] = np.where(match >= 0, match, alone)
    if len(events) == 1:
        return []
    notes = [
        "Collectives have no sequence numbers: those of different ranks were matched by where they end together."
    ]
    if unsure:
        shown = ", ".join(map(str, unsure[:4]))
        notes.append(
            f"Too few of the collectives of rank {shown} end together with another rank's: order decided."
        )
    elif lost:
        are = "1 collective has" if lost == 1 else f"{lost} collectives have"
        notes.append(f"{are} no counterpart on rank {first}.")
    return notes


def _view(own: Events, keys: dict[tuple[object, ...], int]) -> _View:
    rows = np.flatnonzero((own.kind == Kind.COLLECTIVE) & (own.sequence < 0))
    asked_ns = np.where(own.enqueue_ns[rows] >= 0, own.enqueue_ns[rows], own.start_ns[rows])
    rows = rows[np.argsort(asked_ns, kind="stable")]
    described = zip(
        own.group[rows].tolist(), own.name[rows].tolist(), own.size_bytes[rows].tolist(), strict=True
    )
    key = [
        keys.setdefault((group, name, -1 if name in _OWN_SIZES else size_bytes), len(keys))
        for group, name, size_bytes in described
    ]
    return _View(rows, np.array(key, dtype=np.int64), own.end_ns[rows], own.step[rows])


def _matched(first: _View, own: _View) -> tuple[Ints, bool]:
    """For each of ``own``'s collectives the one of ``first`` that it is a view of, or -1; and whether ends agreed."""
    here, there = _candidates(first, own)
    apart_ns = own.end_ns[here] - first.end_ns[there]
    distance_ns, pairs = _commonest(apart_ns, own.step[here] == first.step[there])
    fewest = min(len(first.rows), len(own.rows))
    if pairs < max(min(LEAST_PAIRS, fewest), LEAST_SHARE * fewest):
        return _in_order(first, own), False
    match = np.full(len(own.rows), -1, dtype=np.int64)
    taken = np.zeros(len(first.rows), dtype=bool)
    off_ns = np.abs(apart_ns - distance_ns)
    for pair in np.argsort(off_ns, kind="stable").tolist():
        if off_ns[pair] > TOGETHER_NS:
            break
        if match[here[pair]] < 0 and not taken[there[pair]]:
            match[here[pair]] = there[pair]
            taken[there[pair]] = True
    return match, True


def _candidates(first: _View, own: _View) -> tuple[Indices, Indices]:
    """Pairs of one kind that may be the same collective: about as manieth of their kind, in about the same step."""
    heres, theres = [], []
    for key in np.intersect1d(first.key, own.key).tolist():
        mine, others = np.flatnonzero(own.key == key), np.flatnonzero(first.key == key)
        for shift in range(-MOST_APART, MOST_APART + 1):
            index = np.arange(max(-shift, 0), min(len(mine), len(others) - shift))
            heres.append(mine[index])
            theres.append(others[index + shift])
    here, there = (
        np.concatenate(parts) if parts else np.zeros(0, dtype=np.intp) for parts in (heres, theres)
    )
    near = np.abs(own.step[here] - first.step[there]) <= 1
    return here[near], there[near]


def _commonest(apart_ns: Ints, same_step: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """The distance that most pairs have, to within TOGETHER_NS; and how many. Pairs of one step count for more."""
    if not len(apart_ns):
        return 0, 0
    order = np.argsort(apart_ns)
    ordered = apart_ns[order]
    weight = np.concatenate([[0], np.cumsum(np.where(same_step[order], 3, 2))])
    reach = np.searchsorted(ordered, ordered + TOGETHER_NS, side="right")
    begin = int(np.argmax(weight[reach] - weight[:-1]))
    within = ordered[begin : reach[begin]]
    return int(np.median(within)), len(within)


def _in_order(first: _View, own: _View) -> Ints:
    """The same as manieth of its kind in its step."""
    place = {one: number for number, one in enumerate(_places(first))}
    return np.array([place.get(one, -1) for one in _places(own)], dtype=np.int64)


def _places(view: _View) -> list[tuple[int, int, int]]:
    counted: dict[tuple[int, int], int] = {}
    places = []
    for key, step in zip(view.key.tolist(), view.step.tolist(), strict=True):
        number = counted.get((key, step), 0)
        counted[key, step] = number + 1
        places.append((key, step, number))
    return places
