"""When a schedule's actions run where every pass takes a known time and transfers take none: for pictures and orders.

What a real network makes of a schedule is for a replay to say.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headway.scheduling.pipeline.schedule import Action, Pass, PipelineSchedule

UNITS: Mapping[Pass, int] = {
    Pass.FORWARD: 1, Pass.BACKWARD: 2, Pass.INPUT_GRADIENT: 1, Pass.WEIGHT_GRADIENT: 1,
}  # fmt: skip
"""The usual ratio: both halves of backward take as long as forward."""


@dataclass(frozen=True)
class IdealTimes:
    """``begins[action]`` and ``ends[action]`` in the units that passes were given in; ``order`` is by their begins."""

    order: tuple[Action, ...]
    begins: Mapping[Action, int]
    ends: Mapping[Action, int]

    @property
    def total(self) -> int:
        """When the last action ends."""
        return max(self.ends.values())


def ideal_times(schedule: PipelineSchedule, units: Mapping[Pass, int] = UNITS) -> IdealTimes:
    """Every action as early as its rank and what it needs permit. ``units`` are how long passes take, of any stage."""
    return times_without_messages(schedule, lambda action: units[action.kind])


def times_without_messages(schedule: PipelineSchedule, duration_of: Callable[[Action], int]) -> IdealTimes:
    """The same where every action takes a time of its own."""
    begins: dict[Action, int] = {}
    ends: dict[Action, int] = {}
    order: list[Action] = []
    at = [0] * len(schedule.ranks)
    free = [0] * len(schedule.ranks)
    waiting: dict[Action, list[int]] = {}
    heap: list[tuple[int, int]] = []

    def look(rank: int) -> None:
        """Have the next action of ``rank`` begin when it can, or be looked at again when what it lacks is done."""
        if at[rank] == len(schedule.ranks[rank]):
            return
        action = schedule.ranks[rank][at[rank]]
        needs = tuple(schedule.needs(action))
        for need in needs:
            if need not in ends:
                waiting.setdefault(need, []).append(rank)
                return
        heapq.heappush(heap, (max((free[rank], *(ends[need] for need in needs))), rank))

    for rank in range(len(schedule.ranks)):
        look(rank)
    while heap:
        begin, rank = heapq.heappop(heap)
        action = schedule.ranks[rank][at[rank]]
        begins[action], ends[action] = begin, begin + duration_of(action)
        order.append(action)
        free[rank] = ends[action]
        at[rank] += 1
        for other in (rank, *waiting.pop(action, ())):
            look(other)
    return IdealTimes(tuple(order), begins, ends)


def bubble(schedule: PipelineSchedule, units: Mapping[Pass, int] = UNITS) -> float:
    """The share of all ranks' time that they wait in, where transfers take no time: 0 for a pipeline of one rank."""
    times = ideal_times(schedule, units)
    busy = sum(units[action.kind] for action in times.order)
    return 1 - busy / (times.total * len(schedule.ranks))
