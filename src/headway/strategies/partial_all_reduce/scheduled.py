"""A fixed schedule of groups, asked like a generator: for simulations that compare the two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from headway.coordination.generator import Worker
from headway.coordination.generators.attendance import Attendance, State
from headway.coordination.generators.options import GeneratorOptions
from headway.scheduling.groups import GroupSchedule


class ScheduledState(State):
    """What it knows: the round that each worker asked for last, -1 for none."""

    rounds: tuple[int, ...]


class ScheduledGroups(Attendance[GeneratorOptions]):
    """The groups of a ``GroupSchedule``, each in the round in which its members are. Nobody may leave.

    Live ranks know the schedule and need no coordinator.
    """

    name: ClassVar[str] = "static"
    state_class: ClassVar[type[State]] = ScheduledState

    def __init__(self, schedule: GroupSchedule, hosts: Mapping[Worker, str]) -> None:
        super().__init__(GeneratorOptions(), hosts, 0)
        self._schedule = schedule
        self._rounds = [-1] * schedule.world_size

    def _asked(self, worker: Worker, now_ns: int) -> None:
        self._rounds[worker] += 1

    def _drawn_now(self, now_ns: int) -> Iterator[Sequence[Worker]]:
        del now_ns
        for worker in sorted(self.waiting):
            if worker not in self.waiting:
                continue
            round_ = self._rounds[worker]
            group = self._schedule.group_of(worker, round_) or (worker,)
            if all(self._is_ready(each) and self._rounds[each] == round_ for each in group):
                yield group

    def _known(self) -> dict[str, Any]:
        return {**super()._known(), "rounds": tuple(self._rounds)}

    def _take(self, state: Any) -> None:
        super()._take(state)
        self._rounds = list(state.rounds)
