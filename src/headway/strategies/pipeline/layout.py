"""Pipelines in the graph of all ranks: each goes through its program, as the live runtime does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from headway.graph.blocks import ComputeBlock
from headway.graph.build import GraphBuilder, RankCursor
from headway.graph.step_layout import InRecordedOrder
from headway.graph.timeline import Part, Timeline
from headway.scheduling.pipeline.program import (
    Await,
    ComputeAndSend,
    Message,
    Post,
    Send,
    last_backwards,
    program_of,
)
from headway.scheduling.pipeline.schedule import Action, Pass, PipelineSchedule
from headway.strategies.pipeline.gradients import lay_out_readying, lay_out_update, lay_out_using
from headway.strategies.pipeline.stage_times import INPUT_SHARE, StageTimes

ACTIVATION, GRADIENT = "activation", "gradient"


class PipelineLayout:
    """Lays out steps of ranks of pipelines, of which ``pipelines`` has the ranks of the graph in the schedule's order.

    Without them there is one, and rank ``r`` of the graph is rank ``r`` of the schedule. ``boundary_bytes[s]`` is what
    stage ``s`` hands to stage ``s + 1`` of one micro-batch, and as much comes back. ``replicas`` reacts for those
    of each stage to its last backward, the update and its first forward. A halved backward spends ``input_share`` of
    its time on the gradients of inputs.
    """

    def __init__(
        self,
        graph: GraphBuilder[Any],
        schedule: PipelineSchedule,
        boundary_bytes: tuple[int, ...],
        *,
        pipelines: Sequence[Sequence[int]] = (),
        replicas: Mapping[int, InRecordedOrder] = MappingProxyType({}),
        input_share: float = INPUT_SHARE,
    ) -> None:
        assert len(boundary_bytes) == schedule.stages - 1
        self._graph = graph
        self._schedule = schedule
        self._boundary_bytes = boundary_bytes
        self._replicas = replicas
        self._input_share = input_share
        self.messages: dict[int, Message] = {}  # by the numbers of their transfers
        ranks = range(len(schedule.ranks))
        self._programs = [program_of(schedule, rank, replicas.keys()) for rank in ranks]
        self._lasts = frozenset[Action]().union(
            *(last_backwards(schedule, rank, replicas.keys()) for rank in ranks)
        )
        self._places = {
            rank: (own, at)
            for own in pipelines or [range(len(schedule.ranks))]
            for at, rank in enumerate(own)
        }
        self._stages = [sorted({action.stage for action in own} & replicas.keys()) for own in schedule.ranks]

    def lay_out_step(self, cursor: RankCursor, timeline: Timeline) -> None:
        """Add one step of a rank: what it computes first, its program, the update."""
        times, left_ns = StageTimes.of(timeline), timeline.optimizer_ns
        left_ns = self._lay_out_around(cursor, times.before, left_ns)
        unused = set(self._replicas)  # stages that no forward of this step has gone through
        receives: dict[Message, int] = {}
        awaited: list[int] = []  # since the last computation, which will wait for them
        for instruction in self._programs[self._places[cursor.rank][1]]:
            match instruction:
                case Action() as action if action in self._lasts:
                    lay_out_readying(self._graph, self._replicas[action.stage], cursor, times, action)
                    awaited.clear()
                case ComputeAndSend(action, message):
                    lay_out_readying(
                        self._graph, self._replicas[action.stage], cursor, times, action,
                        send=partial(self._ask, cursor, message),
                    )  # fmt: skip
                    awaited.clear()
                case Action(kind=Pass.FORWARD, stage=stage) as action if stage in unused:
                    unused.remove(stage)
                    lay_out_using(self._graph, self._replicas[stage], cursor, times, action)
                    awaited.clear()
                case Action() as action:
                    part = Part.FORWARD if action.kind is Pass.FORWARD else Part.BACKWARD
                    self._graph.compute(cursor, part, times.duration_ns(action, self._input_share))
                    awaited.clear()
                case Post(message):
                    receives[message] = self._ask(cursor, message, awaited)
                case Await(message):
                    self._graph.wait(cursor, _name(message), receives[message])
                    awaited.append(receives[message])
                case Send(message):
                    self._ask(cursor, message)
        self._lay_out_around(cursor, times.after, left_ns)

    def _lay_out_around(self, cursor: RankCursor, blocks: Sequence[ComputeBlock], left_ns: int) -> int:
        """Add what a rank does before or after its passes, with what is left of its update; returns what then is."""
        stages = self._stages[self._places[cursor.rank][1]]
        if stages:
            items = (item for block in blocks for item in block.items)
            return lay_out_update(
                self._graph, [self._replicas[each] for each in stages], cursor, items, left_ns
            )
        for block in blocks:
            self._graph.compute(cursor, block.kind, block.duration_ns)
        return left_ns

    def _ask(self, cursor: RankCursor, message: Message, after: Iterable[int] = ()) -> int:
        """Send or receive ``message``; returns the number of the transfer."""
        of, ranks = message.of, self._places[cursor.rank][0]
        key = (cursor.step * self._schedule.stages + of.stage) * self._schedule.micro_batches
        number = self._graph.transfer(
            cursor, ranks[message.sender], ranks[message.receiver], key + of.micro_batch,
            self._boundary_bytes[message.boundary], name=_name(message), after=tuple(after),
        )  # fmt: skip
        self.messages[number] = message
        return number


def _name(message: Message) -> str:
    return GRADIENT if message.is_gradient else ACTIVATION
