"""How far apart the models of ranks are that average in groups: mixing matrices, and what they leave."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np


class Consensus:
    """The product of the mixing matrices so far, and how far noise of equal size keeps models apart.

    A group's matrix has 1/|G| in the rows and columns of its members and is the identity elsewhere, so it is doubly
    stochastic. ``weights[r, s]`` is how much of what rank ``s`` began with is in the model of rank ``r``. For the
    spread every iteration of a rank adds an independent update of variance 1, of which groups take averages:
    ``covariance`` is exact, as all of it is linear.
    """

    def __init__(self, world_size: int) -> None:
        self.weights = np.eye(world_size)
        self.covariance = np.zeros((world_size, world_size))

    def iterated(self, rank: int) -> None:
        """A rank has taken a step of its own."""
        self.covariance[rank, rank] += 1.0

    def averaged(self, members: Sequence[int]) -> None:
        """A group has averaged."""
        own = list(members)
        self.weights[own] = self.weights[own].mean(axis=0)
        self.covariance[own] = self.covariance[own].mean(axis=0)
        self.covariance[:, own] = self.covariance[:, own].mean(axis=1, keepdims=True)

    def copied(self, rank: int, source: int) -> None:
        """A rank that joins begins with the model of another."""
        self.weights[rank] = self.weights[source]
        self.covariance[rank] = self.covariance[source]
        self.covariance[:, rank] = self.covariance[:, source]

    def distance(self, ranks: Collection[int]) -> float:
        """The consensus distance of ``ranks`` under the product: 1 where nobody has mixed, 0 in consensus.

        It is the root of the mean squared distance of their rows from their mean row, relative to that of identity.
        """
        own = self.weights[sorted(ranks)]
        if len(own) < 2:
            return 0.0
        apart = own - own.mean(axis=0)
        return float(np.sqrt((apart**2).sum() / (len(own) - 1)))

    def spread(self, ranks: Collection[int]) -> float:
        """The root of the mean squared distance of models from their mean, in updates of one iteration."""
        own = sorted(ranks)
        if len(own) < 2:
            return 0.0
        block = self.covariance[np.ix_(own, own)]
        return float(np.sqrt(max(0.0, np.trace(block) / len(own) - block.mean())))
