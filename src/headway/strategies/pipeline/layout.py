"""Lays pipelines out in the graph of all ranks: every rank follows its program, as in the live runtime.

The replicas of a stage react to its last backward, to the optimizer's step, and to its first forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from headway.graph.build import GraphBuilder, RankCursor
from headway.graph.computation import COMPUTED, ComputeBlock, Item, MessageEnd, Part, Point, Timeline
from headway.graph.step_layout import InRecordedOrder
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
from headway.strategies.pipeline.stage_times import INPUT_SHARE, StageTimes
from headway.trace.events import Read


def lay_out_using(
    graph: GraphBuilder[Any], replicas: InRecordedOrder, cursor: RankCursor, times: StageTimes, action: Action
) -> None:
    """Lay out ``action``, the first forward of a stage, with the reactions of ``replicas`` to the modules it uses."""
    graph.compute(cursor, Part.FORWARD, 0)  # it waits for its message, before anything is used
    items = times.using(action)
    if not any(item.kind == Point.USE for item in items):
        replicas.use_all(cursor)
    for item in items:
        _compute_or_react(graph, replicas, cursor, item)
    rest_ns = times.passes_ns[action] - sum(item.duration_ns for item in items)
    if rest_ns > 0:
        graph.compute(cursor, Part.FORWARD, rest_ns)


def lay_out_update(
    graph: GraphBuilder[Any],
    replicas: Sequence[InRecordedOrder],
    cursor: RankCursor,
    items: Iterable[Item],
    optimizer_ns: int,
) -> int:
    """Lay out ``items``: what a rank does before its first pass or after its last one.

    The update of all stages of the rank takes ``optimizer_ns``; it is split evenly among ``replicas``, at the first
    optimizer step. Returns the time that is left of it. Clipping needs the norm over all stages, so each stage's
    gradients are read whole.
    """
    first, *rest = replicas
    for item in items:
        match item.kind:
            case Point.STEP:
                for replica in replicas:
                    replica.optimizer(cursor, optimizer_ns // len(replicas))
                optimizer_ns = 0
            case Part.OPTIMIZER:
                pass
            case Part.READ:
                read_item = item._replace(name=Read.LOOK) if item.name == Read.CLIP else item
                first.read(cursor, read_item)
                for replica in rest:
                    replica.read(cursor, read_item._replace(duration_ns=0))
            case Part.FINALIZE:
                first.finalize(cursor, item.duration_ns)
            case _ if item.kind in COMPUTED:
                graph.compute(cursor, item.kind, item.duration_ns)
    return optimizer_ns


def lay_out_readying(
    graph: GraphBuilder[Any],
    gradients: InRecordedOrder,
    cursor: RankCursor,
    times: StageTimes,
    action: Action,
    send: Callable[[], object] | None = None,
) -> None:
    """Lay out ``action``, the last backward of a stage, with the reactions of ``gradients`` to ready gradients.

    ``send`` sends the gradient of the stage's input: when it is computed, without waiting for launched collectives.
    """
    graph.compute(cursor, Part.BACKWARD, 0)  # it waits for its message, before anything is launched
    items = times.readying(action)
    for item in items:
        if item.kind == Point.BACKWARD_END and send is not None:
            send()
            send = None
        _compute_or_react(graph, gradients, cursor, item)
    finalize_ns = times.finalize_ns.get(action.stage, 0)
    rest_ns = times.passes_ns[action] - sum(item.duration_ns for item in items) - finalize_ns
    if rest_ns > 0:
        graph.compute(cursor, Part.BACKWARD, rest_ns)
    if finalize_ns:
        gradients.finalize(cursor, finalize_ns)
    if send is not None:
        send()


def _compute_or_react(
    graph: GraphBuilder[Any], replicas: InRecordedOrder, cursor: RankCursor, item: Item
) -> None:
    if item.kind in COMPUTED:
        graph.compute(cursor, item.kind, item.duration_ns)
    else:
        react(replicas, cursor, item)


def react(gradients: InRecordedOrder, cursor: RankCursor, item: Item) -> None:
    """Pass a point of a timeline to the strategy of a stage's replicas."""
    match item.kind:
        case Point.USE:
            gradients.use(cursor, item.name)
        case Point.READY:
            gradients.ready(cursor, item.name)
        case Point.UNUSED:
            gradients.unused(cursor, item.name)
        case Point.BACKWARD_END:
            gradients.backward_end(cursor)


ACTIVATION, GRADIENT = "activation", "gradient"


class PipelineLayout:
    """Lays out the steps of pipelines in the order of ``schedule``.

    ``pipelines[p][r]`` is the rank of the graph that acts as rank ``r`` of the schedule; by default there is one
    pipeline. Stage ``s`` sends ``boundary_bytes[s]`` per micro-batch to stage ``s + 1``, which sends as much back.
    ``replicas[s]`` reacts to the last backward, update and first forward of stage ``s``. A split backward spends
    ``input_share`` of its time on input gradients.
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
            rank: (pipeline, at)
            for pipeline in pipelines or [range(len(schedule.ranks))]
            for at, rank in enumerate(pipeline)
        }
        self._stages = [
            sorted({action.stage for action in actions} & replicas.keys()) for actions in schedule.ranks
        ]

    def lay_out_step(self, cursor: RankCursor, timeline: Timeline) -> None:
        """Add one step of a rank: what precedes its program, the program, the update."""
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
        """Add what a rank does before or after its passes; returns the part of the update (ns) that is left."""
        stages = self._stages[self._places[cursor.rank][1]]
        if stages:
            items = (item for block in blocks for item in block.items)
            return lay_out_update(
                self._graph, [self._replicas[stage] for stage in stages], cursor, items, left_ns
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


_STEPS_APART = 2**40  # more messages than a step has


class RecordedLayout:
    """Lays out computation, sends, receives and waits in their recorded order.

    ``replicas[s]`` reacts to the gradients that the backward of stage ``s`` makes ready.
    """

    def __init__(
        self, graph: GraphBuilder[Any], replicas: Mapping[int, InRecordedOrder] = MappingProxyType({})
    ) -> None:
        self._graph = graph
        self._replicas = replicas

    def lay_out_step(self, cursor: RankCursor, timeline: Timeline) -> None:
        """Add one step as it was recorded."""
        transfers: dict[MessageEnd, int] = {}
        awaited: list[int] = []  # since the last computation, which will wait for them
        for item in timeline.items:
            if item.kind == Point.MESSAGE and item.message:
                transfers[item.message] = self._ask(cursor, item, item.message, awaited)
            elif item.kind == Point.ARRIVED and item.message:
                self._graph.wait(cursor, item.name, transfers[item.message])
                awaited.append(transfers[item.message])
            elif item.kind in COMPUTED and item.duration_ns:
                self._graph.compute(cursor, item.kind, item.duration_ns)
                awaited.clear()
            elif reacts := self._replicas.get(item.stage):
                react(reacts, cursor, item)
        if awaited:
            self._graph.compute(cursor, timeline.items[-1].kind, 0)

    def _ask(self, cursor: RankCursor, item: Item, end: MessageEnd, after: list[int]) -> int:
        sender, receiver = (cursor.rank, end.peer) if end.sends else (end.peer, cursor.rank)
        return self._graph.transfer(
            cursor, sender, receiver, cursor.step * _STEPS_APART + end.sequence, item.size_bytes,
            name=end.group or "message", after=tuple(after),
        )  # fmt: skip
