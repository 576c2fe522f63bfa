"""Global Division (Prague: Luo et al., ASPLOS 2020): all workers without a group are divided at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from headway.coordination.generator import Worker
from headway.coordination.generators.options import DrawingOptions
from headway.coordination.generators.queues import QueuedGroups, divided


class GlobalDivision(QueuedGroups[DrawingOptions]):
    """A worker without a group divides all workers without one into disjoint groups.

    Where it is the only one, it draws any others, as in Group Buffer: it would train for itself otherwise.
    """

    name: ClassVar[str] = "global-division"

    def _draw(self, worker: Worker) -> Iterable[Iterable[Worker]]:
        size = self.options.group_size
        others = self._without_slow(worker, self.present, self.options.slowdown_threshold)
        without = [each for each in others if self._has_none(each)]
        if not without:
            return [(worker, *self.chance.sample(others, size - 1))]
        return divided(self.chance.sample((worker, *without), len(without) + 1), size)
