"""Hosts: which ranks share one, for all that treats the ranks of a host alike."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from headway.cluster import Cluster

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hosts:
    """The ranks of each host, in order; hosts are in the order of their first ranks."""

    ranks: tuple[Ranks, ...]

    @classmethod
    def of_places(cls, places: Sequence[Hashable]) -> Hosts:
        """Of the host of each rank: equal where ranks share one."""
        found: dict[Hashable, list[int]] = {}
        for rank, place in enumerate(places):
            found.setdefault(place, []).append(rank)
        return cls(tuple(map(tuple, found.values())))

    @classmethod
    def of_cluster(cls, cluster: Cluster) -> Hosts:
        """Those of a cluster."""
        return cls.of_places(cluster.host_of_rank)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return sum(map(len, self.ranks))

    @property
    def are_alike(self) -> bool:
        """Whether all have the same number of ranks."""
        return len(set(map(len, self.ranks))) == 1

    @property
    def in_rank_order(self) -> bool:
        """Whether the ranks of each host follow each other, and those of the next host follow them."""
        listed = [rank for ranks in self.ranks for rank in ranks]
        return listed == list(range(len(listed)))

    def number_of(self, rank: int) -> int:
        """Which of the hosts ``rank`` is on."""
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)

    def ranks_of(self, numbers: Sequence[int]) -> Ranks:
        """All ranks of some of the hosts, in order."""
        return tuple(sorted(rank for number in numbers for rank in self.ranks[number]))
