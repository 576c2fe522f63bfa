"""Random groups: of workers that no group was drawn with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from headway.coordination.generator import Worker
from headway.coordination.generators.options import SizeOptions
from headway.coordination.generators.queues import QueuedGroups


class RandomGroups(QueuedGroups[SizeOptions]):
    """A worker without a group draws others without one, so that no two groups that are queued share a worker.

    Where no others are left it goes on alone.
    """

    name: ClassVar[str] = "random"

    def _draw(self, worker: Worker) -> Iterator[Sequence[Worker]]:
        others = [each for each in sorted(self.present) if each != worker and self._has_none(each)]
        yield (worker, *self.chance.sample(others, self.options.group_size - 1))
