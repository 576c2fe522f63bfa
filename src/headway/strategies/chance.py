"""Chance from a seed, the same on every machine, and workers that are slow by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TypeVar

T = TypeVar("T")


class Chance:
    """Draws that a seed and the number of draws before decide: ``count`` is all of its state."""

    def __init__(self, seed: int, count: int = 0) -> None:
        self.seed, self.count = seed, count

    def below(self, limit: int) -> int:
        """A number from 0 to ``limit`` - 1, each as probable as the others."""
        drawn = blake2b(f"{self.seed}:{self.count}".encode(), digest_size=16).digest()
        self.count += 1
        return int.from_bytes(drawn, "big") % limit

    def sample(self, items: Iterable[T], count: int) -> list[T]:
        """``count`` of ``items``, or all where there are fewer, in an order of chance."""
        left = list(items)
        drawn: list[T] = []
        while left and len(drawn) < count:
            drawn.append(left.pop(self.below(len(left)) if len(left) > 1 else 0))
        return drawn

    def pick(self, items: Sequence[T]) -> T:
        """One of ``items``, of which there must be some."""
        (drawn,) = self.sample(items, 1)
        return drawn


RESOLUTION = 1_000_000
MOST_ITERATIONS = 1_000_000


def slowed(share: float, factor: float, seed: int, rank: int, iteration: int) -> float:
    """How many times as long as usual an iteration of a rank takes: ``factor`` with the probability ``share``, or 1."""
    if not share:
        return 1.0
    drawn = Chance(seed, rank * MOST_ITERATIONS + iteration).below(RESOLUTION)
    return factor if drawn < share * RESOLUTION else 1.0


def jittered(jitter: float, seed: int, rank: int, iteration: int) -> float:
    """How many times as long as usual an iteration takes, evenly between 1 - ``jitter`` and 1 + ``jitter``."""
    if not jitter:
        return 1.0
    drawn = Chance(seed + 1, rank * MOST_ITERATIONS + iteration).below(RESOLUTION)
    return 1 + jitter * (2 * drawn / RESOLUTION - 1)
