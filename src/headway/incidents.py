"""Incidents of a simulated job: random slowdowns, and ranks that die or join."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

NS_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class Incidents:
    """Incidents during a simulation: with probability ``slow_share``, an iteration takes ``slow_factor`` times as long.

    ``deaths`` and ``joins`` are (nanoseconds from the start, rank). A rank whose first event is a join is absent from
    the start; a rank may join again after its death.
    """

    slow_share: float = 0.0
    slow_factor: float = 1.0
    deaths: tuple[tuple[int, int], ...] = ()
    joins: tuple[tuple[int, int], ...] = ()

    @property
    def are_there(self) -> bool:
        """Whether there are any incidents."""
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
        """The time of the last death or join; 0 if there is none."""
        return max((time_ns for time_ns, _ in (*self.deaths, *self.joins)), default=0)

    def of(self, rank: int) -> Sequence[tuple[int, bool]]:
        """The deaths and joins of ``rank`` in order: (time in ns, whether it joins)."""
        deaths = [(time_ns, False) for time_ns, incident_rank in self.deaths if incident_rank == rank]
        return sorted(
            [*deaths, *((time_ns, True) for time_ns, incident_rank in self.joins if incident_rank == rank)]
        )

    def twice(self) -> int | None:
        """A rank that dies twice, or joins twice, in a row; None if there is none."""
        for rank in sorted(self.ranks):
            joins = [is_join for _, is_join in self.of(rank)]
            if any(earlier == later for earlier, later in pairwise(joins)):
                return rank
        return None

    def without_members(self) -> Incidents:
        """The incidents without deaths and joins."""
        return Incidents(self.slow_share, self.slow_factor)

    def describe(self) -> Sequence[str]:
        """The incidents in words."""
        sentences = []
        if self.slow_share:
            sentences.append(
                f"{self.slow_share:.3g} of iterations by chance {self.slow_factor:g} times as long"
            )
        sentences += [f"rank {rank} dies after {time_ns / NS_PER_S:g} s" for time_ns, rank in self.deaths]
        sentences += [f"rank {rank} joins after {time_ns / NS_PER_S:g} s" for time_ns, rank in self.joins]
        return sentences
