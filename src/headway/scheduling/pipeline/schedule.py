"""Pipeline schedules: what every rank computes in which order, for the micro-batches of one step.

Transfers follow from it: what a stage computes goes to the next one, its gradient comes back. A rank does its actions
in their order, each as soon as what it needs has arrived.
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
    """What is computed of a stage: forward, all of backward, or one of its halves (zero-bubble schedules)."""

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
    """``ranks[r]`` are the actions of rank ``r`` of each pipeline, in their order; ``micro_batches`` are one step's.

    A rank has receives of up to ``receive_buffers`` messages of each sender posted before it needs them. Raises
    ValueError unless every micro-batch goes once through every stage, forward before backward, each stage has one rank,
    and the order leaves nobody waiting for ever, however slow transfers are.
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
        """How many messages pass between ranks in one step, activations and gradients."""
        hops = zip(self.rank_of_stage, self.rank_of_stage[1:], strict=False)
        return 2 * self.micro_batches * sum(sender != receiver for sender, receiver in hops)

    @property
    def parts(self) -> str:
        """What it cuts a step into, in words."""
        return f"{self.micro_batches} micro-batches through {self.stages} stages"

    @property
    def collectives(self) -> int:
        """How many transfers a step has: fewer are less risk."""
        return self.transfers

    def needs(self, action: Action) -> Iterator[Action]:
        """What must be done, on whatever rank, before ``action`` may begin, besides what its own rank does before."""
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
        """The most micro-batches of which ``rank`` holds activations at a time, over all of its stages or of one."""
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
        """What computes the gradient of what went into ``stage``: all of backward, or its first half."""
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
        """What ranks stand at for ever: nothing, where every action comes about."""
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
    """The order of a recording, whose messages stand where they were recorded rather than where a program has them."""


UNITS: Mapping[Pass, int] = {
    Pass.FORWARD: 1, Pass.BACKWARD: 2, Pass.INPUT_GRADIENT: 1, Pass.WEIGHT_GRADIENT: 1,
}  # fmt: skip
"""The usual ratio: both halves of backward take as long as forward."""


# When a schedule's actions run where every pass takes a known time and transfers take none: for pictures and orders.
#
# What a real network makes of a schedule is for a replay to say.


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
        for waiting_rank in (rank, *waiting.pop(action, ())):
            look(waiting_rank)
    return IdealTimes(tuple(order), begins, ends)


def bubble(schedule: PipelineSchedule, units: Mapping[Pass, int] = UNITS) -> float:
    """The share of all ranks' time that they wait in, where transfers take no time: 0 for a pipeline of one rank."""
    times = ideal_times(schedule, units)
    busy = sum(units[action.kind] for action in times.order)
    return 1 - busy / (times.total * len(schedule.ranks))


def picture(schedule: PipelineSchedule, units: Mapping[Pass, int] = UNITS) -> str:
    """The schedule as it would run where transfers take no time; dots are waiting.

    Cells are F (forward), B (backward), I and W (its halves: gradients of inputs and of weights), each with the number
    of its micro-batch, and before it that of its stage where ranks have several.
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
