"""Groups drawn before all of their members have come: the queues in which workers keep them, in one order for all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Self

from pydantic import model_validator

from headway.coordination.generator import Grant, Worker
from headway.coordination.generators.attendance import Attendance, Count, O, State

Group = tuple[Worker, ...]


class QueuedState(State):
    """What such a generator knows. ``asks`` counts the requests of each worker that is there."""

    queue: tuple[tuple[Count, ...], ...]
    asks: dict[Worker, Count]

    @model_validator(mode="after")
    def _somebody_comes(self) -> Self:
        """Groups are of workers that are there, and whoever waits is in one."""
        drawn = {worker for group in self.queue for worker in group}
        known = set(self.present)
        if (
            not all(self.queue)
            or not drawn <= known
            or not {worker for worker, _ in self.waiting} <= drawn
            or set(self.asks) != known
        ):
            raise ValueError("a group is of workers that are not there, or one waits for no group")
        return self


class QueuedGroups(Attendance[O]):
    """A worker that asks takes the first group that was drawn with it; where there is none, its rule draws.

    Groups are queued in the order in which they were drawn, one order for all workers, and a group begins when all of
    its members wait and no group before it in the queue shares a member. The first in the queue therefore waits for
    nothing but its members' iterations, so there is no deadlock; and as only a worker with nothing queued draws,
    there are never more than a few groups a worker.
    """

    state_class: ClassVar[type[State]] = QueuedState

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.queue: list[Group] = []
        self.asks: dict[Worker, int] = {}

    @abstractmethod
    def _draw(self, worker: Worker) -> Iterable[Iterable[Worker]]:
        """Groups for ``worker``, which has none, and for others, in the order in which they are to begin."""

    def join(self, worker: Worker, now_ns: int) -> Sequence[Grant]:
        """Count a worker in, with as many requests as the others have in the middle: it is not taken for slow."""
        if worker not in self.present:
            others = sorted(self.asks.values())
            self.asks[worker] = others[len(others) // 2] if others else 0
        return super().join(worker, now_ns)

    def _asked(self, worker: Worker, now_ns: int) -> None:
        self.asks[worker] += 1
        if self._has_none(worker):
            drawn = [tuple(sorted(set(group))) for group in self._draw(worker)]
            self.queue += filter(None, drawn)
            assert not self._has_none(worker), "a rule draws a group for whoever asks"

    def _left(self, worker: Worker) -> None:
        del self.asks[worker]
        without = (tuple(each for each in group if each != worker) for group in self.queue)
        self.queue = [group for group in without if group]

    def _drawn_now(self, now_ns: int) -> Iterator[Sequence[Worker]]:
        claimed: set[Worker] = set()
        for group in tuple(self.queue):
            if claimed.isdisjoint(group) and all(map(self._is_ready, group)):
                self.queue.remove(group)
                yield group
            else:
                claimed.update(group)

    def _has_none(self, worker: Worker) -> bool:
        return all(worker not in group for group in self.queue)

    def _without_slow(self, worker: Worker, others: Iterable[Worker], threshold: int) -> list[Worker]:
        """``others`` in order, without ``worker`` itself and those that are ``threshold`` requests behind it.

        The slowdown filter: 0 leaves nobody out.
        """
        counts, own = self.asks, self.asks[worker]
        return [
            each
            for each in sorted(others)
            if each != worker and (not threshold or own - counts[each] < threshold)
        ]

    def _known(self) -> dict[str, Any]:
        return {**super()._known(), "queue": tuple(self.queue), "asks": dict(sorted(self.asks.items()))}

    def _take(self, state: Any) -> None:
        super()._take(state)
        self.queue, self.asks = list(state.queue), dict(state.asks)


def divided(members: Sequence[Worker], size: int) -> list[Sequence[Worker]]:
    """``members`` in groups of at most ``size``, nearly equal ones; of one more where somebody would be alone."""
    count = -(-len(members) // size)
    if count > 1 and len(members) // count < 2:
        count = max(1, len(members) // size)
    ends = [len(members) * number // count for number in range(count + 1)] if count else []
    return [members[begin:end] for begin, end in pairwise(ends)]
