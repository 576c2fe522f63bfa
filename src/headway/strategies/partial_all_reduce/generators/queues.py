"""Base of generators that draw groups before all members arrive, and keep them in one queue."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headway.strategies.partial_all_reduce.generators.attendance import Attendance, Count, State
from headway.strategies.partial_all_reduce.generators.generator import (
    DrawingOptions,
    Grant,
    MixingOptions,
    Worker,
)

SMOOTHING = 4  # iterations over which means are taken


class Pace(BaseModel):
    """Pace of a worker: when it was last free, when it last asked, and its mean ``lag`` and ``period`` (ns)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    free_ns: int
    asked_ns: int | None = None
    lag_ns: int | None = Field(default=None, ge=0)
    period_ns: int | None = Field(default=None, ge=0)


class Lateness:
    """Measures the ``lag`` of each worker: the time from the end of its group until it asks again.

    Request counts do not reveal slow workers: those that average with a slow one ask as rarely as it does. But after the
    end of a group they ask immediately, or after one iteration, and the slow one comes last.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self.paces: dict[Worker, Pace] = {}
        self._shortest_ns: int | None = None  # of mean periods; None: to be found again

    def note_ask(self, worker: Worker, now_ns: int) -> None:
        """Note that a worker asks."""
        if not self._threshold:
            return
        pace = self.paces.get(worker) or Pace(free_ns=now_ns)
        if pace.asked_ns is None:
            self.paces[worker] = pace.model_copy(update={"asked_ns": now_ns})
            return
        lag_ns, period_ns = now_ns - max(pace.free_ns, pace.asked_ns), now_ns - pace.asked_ns
        self.paces[worker] = Pace(
            free_ns=pace.free_ns, asked_ns=now_ns, lag_ns=_mean(pace.lag_ns, max(0, lag_ns)),
            period_ns=_mean(pace.period_ns, max(0, period_ns)),
        )  # fmt: skip
        self._shortest_ns = None

    def freed(self, worker: Worker, now_ns: int) -> None:
        """Note that the group of a worker has ended."""
        if (pace := self.paces.get(worker)) is not None:
            self.paces[worker] = pace.model_copy(update={"free_ns": now_ns})

    def left(self, worker: Worker) -> None:
        """Forget a worker that has left."""
        self.paces.pop(worker, None)
        self._shortest_ns = None

    def is_late(self, worker: Worker, reference: Worker) -> bool:
        """Whether ``worker`` comes later than ``reference`` by the threshold, a share of the shortest iteration."""
        worker_pace, reference_pace = self.paces.get(worker), self.paces.get(reference)
        if (
            worker_pace is None
            or reference_pace is None
            or worker_pace.lag_ns is None
            or reference_pace.lag_ns is None
        ):
            return False
        if self._shortest_ns is None:
            self._shortest_ns = min(
                pace.period_ns for pace in self.paces.values() if pace.period_ns is not None
            )
        return worker_pace.lag_ns - reference_pace.lag_ns > self._threshold * self._shortest_ns

    def snapshot(self) -> dict[Worker, Any]:
        """Return the state as a JSON document."""
        return {worker: pace.model_dump(mode="json") for worker, pace in sorted(self.paces.items())}

    def take(self, paces: Mapping[Worker, Pace]) -> None:
        """Restore a state."""
        self.paces = dict(paces)
        self._shortest_ns = None


def _mean(mean: int | None, new: int) -> int:
    return new if mean is None else mean + (new - mean) // SMOOTHING


Group = tuple[Worker, ...]


class Mixing:
    """Tracks which workers have mixed: the last ``window`` groups of each worker, however long ago.

    Workers that these groups do not connect, directly or through others, train models that drift apart (Partial Reduce:
    Miao et al., SIGMOD 2021).
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self.recent: dict[Worker, tuple[Group, ...]] = {}

    def granted(self, group: Group) -> None:
        """Note that a group begins."""
        for worker in group:
            self.recent[worker] = (*self.recent.get(worker, ()), group)[-self._window :]

    def left(self, worker: Worker) -> None:
        """Forget a worker that has left."""
        self.recent.pop(worker, None)

    def has_full_window(self, worker: Worker) -> bool:
        """Whether a worker has been in at least ``window`` groups, so that missing connections mean isolation."""
        return len(self.recent.get(worker, ())) == self._window

    def parts(self, workers: Iterable[Worker], more: Iterable[Group] = ()) -> Partition:
        """Partition ``workers`` by the recent groups and the upcoming groups ``more``."""
        return Partition(workers, chain(set(chain.from_iterable(self.recent.values())), more))


class Partition:
    """Partition of workers into parts connected by groups (union-find); the least worker identifies a part."""

    def __init__(self, workers: Iterable[Worker], groups: Iterable[Sequence[Worker]]) -> None:
        self._above: dict[Worker, Worker] = {worker: worker for worker in workers}
        for group in groups:
            present = [worker for worker in group if worker in self._above]
            for left, right in pairwise(present):
                first, second = sorted((self.of(left), self.of(right)))
                self._above[second] = first

    def of(self, worker: Worker) -> Worker:
        """Return the part of a worker."""
        while (above := self._above[worker]) != worker:
            self._above[worker] = self._above[above]
            worker = above
        return worker

    def outside(self, worker: Worker) -> list[Worker]:
        """Return the workers of all other parts, in order."""
        part = self.of(worker)
        return [candidate for candidate in sorted(self._above) if self.of(candidate) != part]


O = TypeVar("O", bound=MixingOptions)  # noqa: E741


class QueuedState(State):
    """State of ``QueuedGroups``. ``asks`` counts the requests of each present worker."""

    queue: tuple[tuple[Count, ...], ...]
    asks: dict[Worker, Count]
    recent: dict[Count, tuple[tuple[Count, ...], ...]]
    paces: dict[Count, Pace] = {}

    @model_validator(mode="after")
    def _somebody_comes(self) -> Self:
        """Check that groups consist of present workers and that every waiting worker is in one."""
        drawn = {worker for group in self.queue for worker in group}
        present = set(self.present)
        if (
            not all(self.queue)
            or not drawn <= present
            or not {worker for worker, _ in self.waiting} <= drawn
            or set(self.asks) != present
        ):
            raise ValueError("a group has an absent worker, or a waiting worker is in no group")
        return self


class QueuedGroups(Attendance[O]):
    """A worker that asks takes the first queued group that contains it; if there is none, the rule draws groups.

    One queue keeps groups in the order in which they were drawn. A group begins when all of its members wait and no
    earlier group in the queue shares a member. So the first group only waits for its members' iterations, which rules
    out deadlock; and since only workers without a queued group draw, the queue stays short.

    Rules can isolate workers forever: two groups of equal speed may always be drawn one after the other. If a worker's
    recent groups do not connect it with all others (``Mixing``), it is paired with a worker outside its part instead.
    """

    state_class: ClassVar[type[State]] = QueuedState

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.queue: list[Group] = []
        self.asks: dict[Worker, int] = {}
        self._mixing = Mixing(self.options.mixing_window)
        drawing = self.options if isinstance(self.options, DrawingOptions) else DrawingOptions()
        self._slowdown_threshold = drawing.slowdown_threshold
        self._lateness = Lateness(drawing.lateness_threshold)

    @abstractmethod
    def _draw(self, worker: Worker) -> Iterable[Iterable[Worker]]:
        """Draw groups for ``worker``, which has none, and for others, in the order in which they shall begin."""

    def join(self, worker: Worker, now_ns: int) -> Sequence[Grant]:
        """Add a worker with the median request count of the others, so that it does not count as slow."""
        if worker not in self.present:
            counts = sorted(self.asks.values())
            self.asks[worker] = counts[len(counts) // 2] if counts else 0
        return super().join(worker, now_ns)

    def _on_ask(self, worker: Worker, now_ns: int) -> None:
        self.asks[worker] += 1
        self._lateness.note_ask(worker, now_ns)
        if self._has_none(worker):
            drawn = self._bridge(worker) or self._draw(worker)
            self.queue += filter(None, (tuple(sorted(set(group))) for group in drawn))
            assert not self._has_none(worker), "a rule draws a group for whoever asks"

    def _bridge(self, worker: Worker) -> list[Group]:
        """Pair ``worker`` with one outside its part; empty if there is none, or only slow ones."""
        if not self._mixing.has_full_window(worker):
            return []
        parts = self._mixing.parts(self.present, self.queue)
        outside = self._without_slow(worker, parts.outside(worker))
        return [(worker, self.chance.pick(outside))] if outside else []

    def _on_grant(self, members: tuple[Worker, ...]) -> None:
        self._mixing.granted(members)

    def _on_freed(self, worker: Worker, now_ns: int) -> None:
        self._lateness.freed(worker, now_ns)

    def _on_leave(self, worker: Worker) -> None:
        """Remove a worker that left from groups with waiting members, and drop its other groups."""
        del self.asks[worker]
        self._mixing.left(worker)
        self._lateness.left(worker)
        awaited = {self._first_of(member) for member in self.waiting}
        left: list[Group] = []
        for number, group in enumerate(self.queue):
            if worker not in group:
                left.append(group)
            elif number in awaited:
                left.append(tuple(member for member in group if member != worker))
        self.queue = left

    def _drawn_now(self, now_ns: int) -> Iterator[Sequence[Worker]]:
        claimed: set[Worker] = set()
        for group in tuple(self.queue):
            if claimed.isdisjoint(group) and all(map(self._is_ready, group)):
                self.queue.remove(group)
                yield group
            else:
                claimed.update(group)

    def _first_of(self, worker: Worker) -> int:
        """Position in the queue of a worker's first group."""
        return next(number for number, group in enumerate(self.queue) if worker in group)

    def _has_none(self, worker: Worker) -> bool:
        return all(worker not in group for group in self.queue)

    def _without_slow(self, worker: Worker, candidates: Iterable[Worker]) -> list[Worker]:
        """Return ``candidates`` in order, without ``worker`` and those too slow for it.

        Depending on the options, these have asked much less often than it (slowdown filter) or lag behind it.
        """
        return [
            candidate
            for candidate in sorted(candidates)
            if candidate != worker and not self._is_slow_for(worker, candidate)
        ]

    def _is_slow_for(self, worker: Worker, candidate: Worker) -> bool:
        behind = self.asks[worker] - self.asks[candidate]
        threshold = self._slowdown_threshold
        return (threshold > 0 and behind >= threshold) or self._lateness.is_late(candidate, worker)

    def _is_slow(self, worker: Worker) -> bool:
        """Whether a worker is too slow for most others."""
        peers = [peer for peer in self.present if peer != worker]
        return 2 * sum(self._is_slow_for(peer, worker) for peer in peers) > len(peers)

    def _snapshot(self) -> dict[str, Any]:
        return {
            **super()._snapshot(),
            "queue": tuple(self.queue),
            "asks": dict(sorted(self.asks.items())),
            "recent": dict(self._mixing.recent),
            "paces": self._lateness.snapshot(),
        }

    def _take(self, state: Any) -> None:
        super()._take(state)
        self.queue, self.asks = list(state.queue), dict(state.asks)
        self._mixing.recent = dict(state.recent)
        self._lateness.take(state.paces)


def divided(members: Sequence[Worker], size: int) -> list[Sequence[Worker]]:
    """Divide ``members`` into nearly equal groups of at most ``size``, or one more to avoid groups of one."""
    count = -(-len(members) // size)
    if count > 1 and len(members) // count < 2:
        count = max(1, len(members) // size)
    ends = [len(members) * number // count for number in range(count + 1)] if count else []
    return [members[begin:end] for begin, end in pairwise(ends)]
