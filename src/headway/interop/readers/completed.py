"""What is known of one rank's collectives when they are told from one another: their kinds and when they ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from headway.arrays import Flags, Indices, Ints


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
    for key, mine in groups[0].items():
        if key in groups[1]:
            yield mine, groups[1][key]


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
