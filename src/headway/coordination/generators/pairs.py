"""Pairs: a worker averages with a random neighbour (AD-PSGD: Lian et al., ICML 2018)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from headway.coordination.generator import Worker
from headway.coordination.generators.options import PairOptions
from headway.coordination.generators.queues import QueuedGroups


class Pairs(QueuedGroups[PairOptions]):
    """A worker without a partner draws one of its neighbours, and averages with it when that one has come.

    Neighbours are, as in AD-PSGD, the workers of the other half, so that no requests form a cycle (here the one order
    of the queues sees to that too), or all others. AD-PSGD's passive half answers at any time; here both come between
    iterations. A worker without neighbours takes anybody, or goes on alone.
    """

    name: ClassVar[str] = "pairs"

    def _draw(self, worker: Worker) -> Iterator[Sequence[Worker]]:
        others = sorted(self.present - {worker})
        if self.options.neighbours == "bipartite":
            others = [each for each in others if (each - worker) % 2] or others
        yield (worker, *self.chance.sample(others, 1))
