"""Seeded random draws that are the same on every machine, and random slowdowns of workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TypeVar

T = TypeVar("T")


class Chance:
    """Random draws determined by a seed and the number of earlier draws, ``count``."""

    def __init__(self, seed: int, count: int = 0) -> None:
        self.seed, self.count = seed, count

    def below(self, limit: int) -> int:
        """Draw an integer from 0 to ``limit`` - 1, uniformly."""
        drawn = blake2b(f"{self.seed}:{self.count}".encode(), digest_size=16).digest()
        self.count += 1
        return int.from_bytes(drawn, "big") % limit

    def sample(self, items: Iterable[T], count: int) -> list[T]:
        """Draw ``count`` of ``items``, or all if there are fewer, in random order."""
        left = list(items)
        drawn: list[T] = []
        while left and len(drawn) < count:
            drawn.append(left.pop(self.below(len(left)) if len(left) > 1 else 0))
        return drawn

    def pick(self, items: Sequence[T]) -> T:
        """Draw one of ``items``, which must not be empty."""
        (drawn,) = self.sample(items, 1)
        return drawn


RESOLUTION = 1_000_000
MOST_ITERATIONS = 1_000_000


def slowed(share: float, factor: float, seed: int, rank: int, iteration: int) -> float:
    """Return the slowdown of an iteration: ``factor`` with probability ``share``, else 1."""
    if not share:
        return 1.0
    drawn = Chance(seed, rank * MOST_ITERATIONS + iteration).below(RESOLUTION)
    return factor if drawn < share * RESOLUTION else 1.0


def jittered(jitter: float, seed: int, rank: int, iteration: int) -> float:
    """Return the slowdown of an iteration, uniform between 1 - ``jitter`` and 1 + ``jitter``."""
    if not jitter:
        return 1.0
    drawn = Chance(seed + 1, rank * MOST_ITERATIONS + iteration).below(RESOLUTION)
    return 1 + jitter * (2 * drawn / RESOLUTION - 1)
