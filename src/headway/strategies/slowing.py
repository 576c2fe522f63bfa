"""Which iterations of which ranks take longer by chance: the same in every simulation of a job."""

from __future__ import annotations

from headway.coordination.generators.chance import Chance

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
