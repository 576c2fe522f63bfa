"""What a simulated job lives through besides training: iterations that are slow by chance, deaths, and joins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

NS_A_S = 1e9


@dataclass(frozen=True, slots=True)
class Incidents:
    """Every iteration of a rank takes, with the probability ``slow_share``, ``slow_factor`` times as long.

    ``deaths`` and ``joins`` are (nanoseconds from the start, rank): a rank that joins first is not there from the
    start; one may join again after its death.
    """

    slow_share: float = 0.0
    slow_factor: float = 1.0
    deaths: tuple[tuple[int, int], ...] = ()
    joins: tuple[tuple[int, int], ...] = ()

    @property
    def are_there(self) -> bool:
        """Whether anything happens."""
        return bool(self.slow_share or self.change_members)

    @property
    def change_members(self) -> bool:
        """Whether ranks die or join."""
        return bool(self.deaths or self.joins)

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that die or join."""
        return frozenset(rank for _, rank in (*self.deaths, *self.joins))

    @property
    def last_ns(self) -> int:
        """When the last rank dies or joins; 0 where none does."""
        return max((time_ns for time_ns, _ in (*self.deaths, *self.joins)), default=0)

    def of(self, rank: int) -> Sequence[tuple[int, bool]]:
        """When something happens to ``rank``, in order, and whether it joins then."""
        deaths = [(time_ns, False) for time_ns, each in self.deaths if each == rank]
        return sorted([*deaths, *((time_ns, True) for time_ns, each in self.joins if each == rank)])

    def twice(self) -> int | None:
        """A rank that dies or joins twice, one time after the other; None where there is none."""
        for rank in sorted(self.ranks):
            joins = [is_join for _, is_join in self.of(rank)]
            if any(one == other for one, other in pairwise(joins)):
                return rank
        return None

    def without_members(self) -> Incidents:
        """The same without deaths and joins."""
        return Incidents(self.slow_share, self.slow_factor)

    def describe(self) -> Sequence[str]:
        """What happens, in words."""
        said = []
        if self.slow_share:
            said.append(f"{self.slow_share:.3g} of iterations by chance {self.slow_factor:g} times as long")
        said += [f"rank {rank} dies after {time_ns / NS_A_S:g} s" for time_ns, rank in self.deaths]
        said += [f"rank {rank} joins after {time_ns / NS_A_S:g} s" for time_ns, rank in self.joins]
        return said
