"""Numbering collectives whose recordings do not number them, so that ranks' views of the same one are known to be."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from headway.arrays import Ints
from headway.interop.readers.completed import CompletedCollectives
from headway.interop.readers.pairing import paired, same_order
from headway.trace.events import Events, Kind

_OWN_SIZES = ("all_to_all", "all_gather", "send_receive", "broadcast")  # ranks may well state different sizes

Keys = dict[tuple[str, str, int], int]
"""Numbers for kinds of collectives: by group, name and size."""


def number_collectives(events: Mapping[int, Events]) -> list[str]:
    """Give the collectives of ``events`` that have no sequence one, in place. Returns what has to be said of it."""
    notes = _take_over(events)
    keys: Keys = {}
    views = {rank: _view(own, keys, _unnumbered(own)) for rank, own in events.items()}
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
    numbered = {rank: (own.kind == Kind.COLLECTIVE) & (own.sequence >= 0) for rank, own in events.items()}
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
