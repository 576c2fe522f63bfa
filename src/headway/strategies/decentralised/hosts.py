"""Hosts: which ranks are on which, where the ranks of a host are one worker together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hosts:
    """The ranks of each host, in order; hosts are in the order of their first ranks, which is that of workers."""

    ranks: tuple[Ranks, ...]

    @classmethod
    def of_places(cls, places: Sequence[Hashable]) -> Hosts:
        """Of the host of each rank: equal where ranks share one."""
        found: dict[Hashable, list[int]] = {}
        for rank, place in enumerate(places):
            found.setdefault(place, []).append(rank)
        return cls(tuple(map(tuple, found.values())))

    def number_of(self, rank: int) -> int:
        """Which of the hosts ``rank`` is on."""
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)

    def ranks_of(self, numbers: Sequence[int]) -> Ranks:
        """All ranks of some of the hosts, in order."""
        return tuple(sorted(rank for number in numbers for rank in self.ranks[number]))
