"""Group Buffer (Prague: Luo et al., ASPLOS 2020): workers keep the groups that others drew with them, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from headway.coordination.generator import Worker
from headway.coordination.generators.options import DrawingOptions
from headway.coordination.generators.queues import QueuedGroups


class GroupBuffer(QueuedGroups[DrawingOptions]):
    """A worker without a group draws any others; those that have groups already come to this one after them."""

    name: ClassVar[str] = "group-buffer"

    def _draw(self, worker: Worker) -> Iterator[Sequence[Worker]]:
        others = self._without_slow(worker, self.present, self.options.slowdown_threshold)
        yield (worker, *self.chance.sample(others, self.options.group_size - 1))
