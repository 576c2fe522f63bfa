"""Pipeline schedules: the order of passes on every rank for the micro-batches of one step; bubbles and pictures of them.

Transfers follow from the order: activations go to the next stage, gradients come back. A rank runs its actions in order,
each as soon as its inputs have arrived.
"""

from __future__ import annotations

import enum
import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Pass(enum.Enum):
    """A pass through a stage: forward, backward, or one half of a split backward (zero-bubble schedules)."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


class Action(NamedTuple):
    """One pass of one micro-batch through one stage; both are counted from 0."""

    kind: Pass
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


@dataclass(frozen=True)
class PipelineSchedule:
    """``ranks[r]`` are the actions of rank ``r`` in order, for ``micro_batches`` per step.

    A rank posts up to ``receive_buffers`` receives per sender in advance. Raises ValueError unless every micro-batch
    passes once through every stage, each stage is on one rank, and the order is free of deadlocks.
    """

    ranks: tuple[tuple[Action, ...], ...]
    micro_batches: int
    receive_buffers: int = 1

    def __post_init__(self) -> None:
        if self.receive_buffers < 1:
            raise ValueError(f"a rank has at least one receive buffer, not {self.receive_buffers}")
        self._check_complete()
        if stuck := self._stuck():
            raise ValueError(f"the schedule never gets past {', '.join(map(str, stuck))}")

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The rank that computes each stage."""
        rank_of = {action.stage: rank for rank, actions in enumerate(self.ranks) for action in actions}
        return tuple(rank_of[stage] for stage in sorted(rank_of))

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.rank_of_stage)

    @property
    def transfers(self) -> int:
        """The number of messages between ranks per step, activations and gradients."""
        hops = zip(self.rank_of_stage, self.rank_of_stage[1:], strict=False)
        return 2 * self.micro_batches * sum(sender != receiver for sender, receiver in hops)

    @property
    def parts(self) -> str:
        """The parts of a step, in words."""
        return f"{self.micro_batches} micro-batches through {self.stages} stages"

    @property
    def collectives(self) -> int:
        """The number of transfers per step: fewer mean less risk."""
        return self.transfers

    def needs(self, action: Action) -> Iterator[Action]:
        """The actions, on any rank, whose results ``action`` needs."""
        kind, stage, micro_batch = action
        if kind is Pass.FORWARD:
            if stage:
                yield Action(Pass.FORWARD, stage - 1, micro_batch)
        elif kind is Pass.WEIGHT_GRADIENT:
            yield Action(Pass.INPUT_GRADIENT, stage, micro_batch)
        else:
            yield Action(Pass.FORWARD, stage, micro_batch)
            if stage + 1 < self.stages:
                yield self.first_of_backward(stage + 1, micro_batch)

    def most_in_flight(self, rank: int, stage: int | None = None) -> int:
        """The peak number of micro-batches whose activations ``rank`` holds, over all its stages or one."""
        most = held = 0
        for action in self.ranks[rank]:
            if stage not in (None, action.stage):
                continue
            if action.kind is Pass.FORWARD:
                held += 1
                most = max(most, held)
            elif action.kind is not Pass.INPUT_GRADIENT:
                held -= 1
        return most

    def first_of_backward(self, stage: int, micro_batch: int) -> Action:
        """The action that computes the input gradient of ``stage``: a whole backward, or its first half."""
        half = Action(Pass.INPUT_GRADIENT, stage, micro_batch)
        return half if half in self._places else Action(Pass.BACKWARD, stage, micro_batch)

    @cached_property
    def _places(self) -> dict[Action, int]:
        return {action: rank for rank, actions in enumerate(self.ranks) for action in actions}

    def _check_complete(self) -> None:
        places = self._places
        count = sum(map(len, self.ranks))
        if count != len(places):
            raise ValueError("an action is listed twice")
        stages = range(1 + max((action.stage for action in places), default=-1))
        if not stages or self.micro_batches < 1:
            raise ValueError("a schedule has at least one stage and one micro-batch")
        expected = 0
        for stage in stages:
            ranks = set()
            for micro_batch in range(self.micro_batches):
                kinds = [kind for kind in Pass if Action(kind, stage, micro_batch) in places]
                if kinds not in (
                    [Pass.FORWARD, Pass.BACKWARD],
                    [Pass.FORWARD, Pass.INPUT_GRADIENT, Pass.WEIGHT_GRADIENT],
                ):
                    passes = ", ".join(kind.name for kind in kinds) or "nothing"
                    raise ValueError(f"micro-batch {micro_batch} goes through stage {stage} as {passes}")
                expected += len(kinds)
                ranks |= {places[Action(kind, stage, micro_batch)] for kind in kinds}
            if len(ranks) > 1:
                raise ValueError(f"stage {stage} is on ranks {', '.join(map(str, sorted(ranks)))}")
        if count != expected:
            raise ValueError(f"an action is of a micro-batch that is not below {self.micro_batches}")

    def _stuck(self) -> list[Action]:
        """The actions at which ranks deadlock; empty if all actions complete."""
        done: set[Action] = set()
        at = [0] * len(self.ranks)
        waiting: dict[Action, list[int]] = {}
        ready = deque(range(len(self.ranks)))
        while ready:
            rank = ready.popleft()
            while at[rank] < len(self.ranks[rank]):
                action = self.ranks[rank][at[rank]]
                missing = next((need for need in self.needs(action) if need not in done), None)
                if missing is not None:
                    waiting.setdefault(missing, []).append(rank)
                    break
                done.add(action)
                at[rank] += 1
                ready.extend(waiting.pop(action, ()))
        return [actions[place] for actions, place in zip(self.ranks, at, strict=True) if place < len(actions)]


@dataclass(frozen=True)
class RecordedPipelineSchedule(PipelineSchedule):
    """The order of a recording; messages stay where they were recorded instead of following a program."""


UNITS: Mapping[Pass, int] = {
    Pass.FORWARD: 1, Pass.BACKWARD: 2, Pass.INPUT_GRADIENT: 1, Pass.WEIGHT_GRADIENT: 1,
}  # fmt: skip
"""The usual ratio: each half of a backward takes as long as a forward."""


@dataclass(frozen=True)
class IdealTimes:
    """The times of actions without transfer times, in the units of the passes; ``order`` is sorted by begin."""

    order: tuple[Action, ...]
    begins: Mapping[Action, int]
    ends: Mapping[Action, int]

    @property
    def total(self) -> int:
        """The end of the last action."""
        return max(self.ends.values())


def ideal_times(schedule: PipelineSchedule, units: Mapping[Pass, int] = UNITS) -> IdealTimes:
    """Run every action as early as possible; ``units`` are the durations of passes, equal for all stages."""
    return times_without_messages(schedule, lambda action: units[action.kind])


def times_without_messages(schedule: PipelineSchedule, duration_of: Callable[[Action], int]) -> IdealTimes:
    """Run every action as early as possible, with a duration per action and instant transfers."""
    begins: dict[Action, int] = {}
    ends: dict[Action, int] = {}
    order: list[Action] = []
    at = [0] * len(schedule.ranks)
    free = [0] * len(schedule.ranks)
    waiting: dict[Action, list[int]] = {}
    heap: list[tuple[int, int]] = []

    def look(rank: int) -> None:
        """Queue the next action of ``rank``, or wait for the first input that it lacks."""
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
        for waiting_rank in (rank, *waiting.pop(action, ())):
            look(waiting_rank)
    return IdealTimes(tuple(order), begins, ends)


def bubble(schedule: PipelineSchedule, units: Mapping[Pass, int] = UNITS) -> float:
    """The fraction of all ranks' time that is idle, with instant transfers; 0 for a single rank."""
    times = ideal_times(schedule, units)
    busy = sum(units[action.kind] for action in times.order)
    return 1 - busy / (times.total * len(schedule.ranks))


def picture(schedule: PipelineSchedule, units: Mapping[Pass, int] = UNITS) -> str:
    """Draw the schedule with instant transfers; dots are idle time.

    Cells are F (forward), B (backward), I and W (its halves: input and weight gradients), followed by the micro-batch,
    and preceded by the stage if ranks have several.
    """
    times = ideal_times(schedule, units)
    several = schedule.stages > len(schedule.ranks)
    names = {action: _name(action, with_stage=several) for action in times.order}
    width = 1 + max(map(len, names.values()))
    lines = []
    for rank, actions in enumerate(schedule.ranks):
        cells = ["·"] * times.total
        for action in actions:
            begin, end = times.begins[action], times.ends[action]
            cells[begin:end] = [names[action], *["─" * (width - 1)] * (end - begin - 1)]
        lines.append(f"rank {rank:<{len(str(len(schedule.ranks) - 1))}}  " + _row(cells, width))
    return "\n".join(lines)


def _row(cells: list[str], width: int) -> str:
    return "".join(cell.ljust(width) for cell in cells).rstrip()


def _name(action: Action, *, with_stage: bool) -> str:
    stage = f"{action.stage}" if with_stage else ""
    return f"{stage}{action.kind.value}{action.micro_batch}"
