"""What ranks tell each other of some steps: how long they were, and what a rank stood still for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple, Self


class RankWindow(NamedTuple):
    """Some steps of one rank, each value as that of one step.

    ``step_ms`` lies within ``uncertainty_ms`` in nineteen of twenty cases, if steps are like each other. ``waited_ms``
    is how long training stood still for communication, NaN where nobody sees that, as under stock DDP; ``byte_ns`` what
    a byte took in its collectives: NaN where there were none.
    """

    step_ms: float
    uncertainty_ms: float
    waited_ms: float
    byte_ns: float

    @property
    def computed_ms(self) -> float:
        """What is left of a step without waiting."""
        return max(0.0, self.step_ms - self.waited_ms)


class Window(NamedTuple):
    """The steps before ``step``, as every rank saw them."""

    step: int
    ranks: tuple[RankWindow, ...]

    @classmethod
    def of(cls, step: int, ranks: Sequence[Sequence[float]]) -> Self:
        """From the numbers of each rank."""
        return cls(step, tuple(RankWindow(*own) for own in ranks))

    @property
    def step_ms(self) -> float:
        """A step of the job: ranks wait for each other, so that the slowest has it."""
        return max(rank.step_ms for rank in self.ranks)

    @property
    def uncertainty_ms(self) -> float:
        """By how much that may be off."""
        return max(rank.uncertainty_ms for rank in self.ranks)

    @property
    def waits_are_known(self) -> bool:
        """Whether it is known of every rank how long it stood still."""
        return not any(math.isnan(rank.waited_ms) for rank in self.ranks)

    @property
    def byte_ns(self) -> float:
        """What a byte took on the rank that waited least within its collectives; NaN where no rank had any.

        Whoever is there first waits for the last, so that on most ranks a straggler looks like a slow network.
        """
        return min((rank.byte_ns for rank in self.ranks if not math.isnan(rank.byte_ns)), default=math.nan)


def joined(windows: Sequence[Window]) -> Window:
    """Several windows as one, rank by rank: the means of what they saw."""
    ranks = zip(*(window.ranks for window in windows), strict=True)
    count = len(windows)
    return Window(
        windows[-1].step,
        tuple(
            RankWindow(
                fmean(each.step_ms for each in own),
                math.hypot(*(each.uncertainty_ms for each in own)) / count,
                fmean(each.waited_ms for each in own),
                fmean(each.byte_ns for each in own),
            )
            for own in ranks
        ),
    )
