"""First come, first averaged: groups of whoever is there (Partial Reduce: Miao et al., SIGMOD 2021)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from headway.coordination.generator import Worker
from headway.coordination.generators.attendance import Attendance, Count, State
from headway.coordination.generators.options import FirstComeOptions

SMOOTHING = 8  # arrivals over which the mean time between two is taken


class FirstComeState(State):
    """What it knows: when somebody came last, the mean time between arrivals, and the groups of the window."""

    last_ask_ns: int | None
    mean_gap_ns: int | None
    recent: tuple[tuple[Count, ...], ...]


class FirstCome(Attendance[FirstComeOptions]):
    """A group begins when ``group_size`` workers wait, or when the first of them has waited for the deadline.

    Nobody waits for a straggler, and nobody is in two groups. The deadline is ``patience`` times as long as a group
    takes to fill at the mean time between arrivals (a moving average). Against update isolation, by which some workers
    would average only with each other: groups are of workers that did not mix lately, where there is a choice; and
    while those of the last ``window`` grants fall into parts that did not mix at all, and all who wait are of one part,
    the first of them waits, beyond its deadline, for one of another part. Its peers do not wait.
    """

    name: ClassVar[str] = "first-come"
    state_class: ClassVar[type[State]] = FirstComeState

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._last_ask_ns: int | None = None
        self._mean_gap_ns: int | None = None
        self._recent: deque[tuple[Worker, ...]] = deque()

    @property
    def deadline_ns(self) -> int:
        """How long the first to come waits at present."""
        options = self.options
        if options.deadline_ms is not None:
            return round(options.deadline_ms * 1e6)
        least_ns, most_ns = round(options.least_ms * 1e6), round(options.most_ms * 1e6)
        if self._mean_gap_ns is None:
            return most_ns
        fills_ns = self._mean_gap_ns * (options.group_size - 1)
        return min(max(round(options.patience * fills_ns), least_ns), most_ns)

    @property
    def wake_ns(self) -> int | None:
        """The deadline of the first of those who wait for no other part."""
        candidates = self._candidates()
        return self.waiting[candidates[0]] + self.deadline_ns if candidates else None

    def _asked(self, worker: Worker, now_ns: int) -> None:
        if self._last_ask_ns is not None:
            gap_ns, mean_ns = now_ns - self._last_ask_ns, self._mean_gap_ns
            self._mean_gap_ns = gap_ns if mean_ns is None else mean_ns + (gap_ns - mean_ns) // SMOOTHING
        self._last_ask_ns = now_ns

    def _drawn_now(self, now_ns: int) -> Iterator[Sequence[Worker]]:
        while candidates := self._candidates():
            others_may_come = len(self.waiting) < len(self.present)
            full = len(candidates) >= self.options.group_size or not others_may_come
            if not full and now_ns < self.waiting[candidates[0]] + self.deadline_ns:
                return
            group = self._chosen(candidates)
            self._recent.append(tuple(sorted(group)))
            window = self.options.window or 4 * len(self.present)
            while len(self._recent) > window:
                self._recent.popleft()
            yield group

    def _candidates(self) -> list[Worker]:
        """Who waits for a group, the first to come first, without the one that waits for another part."""
        ready = list(filter(self._is_ready, self.waiting))
        parts = _Parts(self.present, self._recent)
        if not ready or not parts.several:
            return ready
        own = parts.of(ready[0])
        if any(parts.of(each) != own for each in ready):
            return ready
        coming = any(parts.of(each) != own for each in self.present if each not in ready)
        return ready[1:] if coming else ready

    def _chosen(self, candidates: Sequence[Worker]) -> list[Worker]:
        """The first of them, and then those of parts that are not in the group yet before others."""
        parts = _Parts(self.present, self._recent)
        chosen, left = [candidates[0]], list(candidates[1:])
        while left and len(chosen) < self.options.group_size:
            inside = {parts.of(each) for each in chosen}
            other = next((each for each in left if parts.of(each) not in inside), left[0])
            left.remove(other)
            chosen.append(other)
        return chosen

    def _known(self) -> dict[str, Any]:
        return {
            **super()._known(),
            "last_ask_ns": self._last_ask_ns,
            "mean_gap_ns": self._mean_gap_ns,
            "recent": tuple(self._recent),
        }

    def _take(self, state: Any) -> None:
        super()._take(state)
        self._last_ask_ns, self._mean_gap_ns = state.last_ask_ns, state.mean_gap_ns
        self._recent = deque(state.recent)


class _Parts:
    """The workers that groups connect with each other: each part is known by its least worker."""

    def __init__(self, workers: Iterable[Worker], groups: Iterable[Sequence[Worker]]) -> None:
        self._above = {worker: worker for worker in workers}
        for group in groups:
            present = [worker for worker in group if worker in self._above]
            for one, other in pairwise(present):
                first, second = sorted((self.of(one), self.of(other)))
                self._above[second] = first

    def of(self, worker: Worker) -> Worker:
        while (above := self._above[worker]) != worker:
            self._above[worker] = self._above[above]
            worker = above
        return worker

    @property
    def several(self) -> bool:
        return len(set(map(self.of, self._above))) > 1
