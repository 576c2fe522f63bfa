"""Mixing matrices of groups: how far apart the models of ranks are, and how fast they mix."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

TOLERANCE = 0.01
"""Ranks count as mixed within this consensus distance."""
MOST_RANKS = 512  # for which matrices are multiplied
STARTS = 8  # starting points over which the time to mix is averaged


def iterations_to_mix(
    rounds: Sequence[Sequence[int]], world_size: int, tolerance: float = TOLERANCE
) -> float | None:
    """Iterations per rank until the product of mixing matrices is within ``tolerance`` of consensus.

    ``rounds`` are the members of each group, in the order of their ends; a rank that continues alone is a round of one.
    The result is a mean over several starting points; None if there are too few rounds or too many ranks.
    """
    if not 1 < world_size <= MOST_RANKS:
        return None
    taken = [
        count
        for start in range(0, len(rounds), max(1, len(rounds) // STARTS))
        if (count := _iterations_from(rounds[start:], world_size, tolerance)) is not None
    ]
    return sum(taken) / len(taken) if taken else None


def _iterations_from(rounds: Sequence[Sequence[int]], world_size: int, tolerance: float) -> float | None:
    mixing = Mixing(world_size, tolerance)
    for members in rounds:
        if (count := mixing.averaged(members, len(members))) is not None:
            return count
    return None


class Mixing:
    """Multiplies mixing matrices until their product is within ``tolerance`` of consensus."""

    def __init__(self, world_size: int, tolerance: float = TOLERANCE) -> None:
        self._world_size, self._tolerance = world_size, tolerance
        self._consensus = Consensus(world_size)
        self._done = self._checked = 0

    def averaged(self, members: Sequence[int], iterations: int) -> float | None:
        """Add a group after ``iterations`` of ranks; returns the iterations per rank once all have mixed, else None."""
        self._consensus.averaged(members)
        self._done += iterations
        if self._done - self._checked < max(1, self._world_size // 4):
            return None
        self._checked = self._done
        if self._consensus.distance(range(self._world_size)) > self._tolerance:
            return None
        return self._done / self._world_size


class Consensus:
    """Product of the mixing matrices so far, and the spread of models under independent updates.

    A group's matrix has 1/|G| in the rows and columns of its members and is the identity elsewhere, so it is doubly
    stochastic. ``weights[r, s]`` is the weight of rank ``s``'s initial model in the model of rank ``r``. For the spread,
    every iteration of a rank adds an independent update of variance 1; ``covariance`` is exact, since averaging is
    linear.
    """

    def __init__(self, world_size: int) -> None:
        self.weights = np.eye(world_size)
        self.covariance = np.zeros((world_size, world_size))

    def iterated(self, rank: int) -> None:
        """A rank has finished an iteration."""
        self.covariance[rank, rank] += 1.0

    def averaged(self, members: Sequence[int]) -> None:
        """A group has averaged."""
        rows = list(members)
        self.weights[rows] = self.weights[rows].mean(axis=0)
        self.covariance[rows] = self.covariance[rows].mean(axis=0)
        self.covariance[:, rows] = self.covariance[:, rows].mean(axis=1, keepdims=True)

    def copied(self, rank: int, source: int) -> None:
        """A joining rank copies the model of another."""
        self.weights[rank] = self.weights[source]
        self.covariance[rank] = self.covariance[source]
        self.covariance[:, rank] = self.covariance[:, source]

    def distance(self, ranks: Collection[int]) -> float:
        """Consensus distance of ``ranks``: 1 before any mixing, 0 in consensus.

        It is the root mean squared distance of their rows of ``weights`` from the mean row, relative to the identity.
        """
        rows = self.weights[sorted(ranks)]
        if len(rows) < 2:
            return 0.0
        apart = rows - rows.mean(axis=0)
        return float(np.sqrt((apart**2).sum() / (len(rows) - 1)))

    def spread(self, ranks: Collection[int]) -> float:
        """Root mean squared distance of models from their mean, in units of one iteration's update."""
        indices = sorted(ranks)
        if len(indices) < 2:
            return 0.0
        block = self.covariance[np.ix_(indices, indices)]
        return float(np.sqrt(max(0.0, np.trace(block) / len(indices) - block.mean())))
