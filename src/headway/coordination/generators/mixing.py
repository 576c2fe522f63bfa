"""Update isolation: whether the groups that workers were in lately connect them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise

from headway.coordination.generator import Worker

Group = tuple[Worker, ...]


class Mixing:
    """The last ``window`` groups of each worker, however long ago: who is slow keeps its groups for longer.

    Workers that these do not connect, directly or by way of others, train models that drift apart (Partial Reduce:
    Miao et al., SIGMOD 2021).
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self.recent: dict[Worker, tuple[Group, ...]] = {}

    def granted(self, group: Group) -> None:
        """A group begins."""
        for worker in group:
            self.recent[worker] = (*self.recent.get(worker, ()), group)[-self._window :]

    def left(self, worker: Worker) -> None:
        """A worker is not there any more."""
        self.recent.pop(worker, None)

    def is_known(self, worker: Worker) -> bool:
        """Whether it was in as many groups as count, so that it would be connected if it ever were."""
        return len(self.recent.get(worker, ())) == self._window

    def parts(self, workers: Iterable[Worker], more: Iterable[Group] = ()) -> Parts:
        """What groups, and ``more`` that are to begin, connect of ``workers``."""
        return Parts(workers, chain(set(chain.from_iterable(self.recent.values())), more))


class Parts:
    """The workers that groups connect with each other: each part is known by its least worker."""

    def __init__(self, workers: Iterable[Worker], groups: Iterable[Sequence[Worker]]) -> None:
        self._above: dict[Worker, Worker] = {worker: worker for worker in workers}
        for group in groups:
            present = [worker for worker in group if worker in self._above]
            for one, other in pairwise(present):
                first, second = sorted((self.of(one), self.of(other)))
                self._above[second] = first

    def of(self, worker: Worker) -> Worker:
        """The part that a worker belongs to."""
        while (above := self._above[worker]) != worker:
            self._above[worker] = self._above[above]
            worker = above
        return worker

    def outside(self, worker: Worker) -> list[Worker]:
        """Those of the other parts, in order."""
        own = self.of(worker)
        return [each for each in sorted(self._above) if self.of(each) != own]
