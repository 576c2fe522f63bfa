"""A recorded pipeline in the graph as it was run, by whatever runtime: its messages at the points where they stood."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headway.graph.blocks import COMPUTED
from headway.graph.build import GraphBuilder, RankCursor
from headway.graph.step_layout import InRecordedOrder
from headway.graph.timeline import Item, MessageEnd, Point, Timeline
from headway.strategies.pipeline.gradients import react

_STEPS_APART = 2**40  # more messages than a step has


class RecordedLayout:
    """Lays out computation in its recorded order, and sends, receives and waits between it.

    ``replicas`` reacts for those of each stage to the gradients that a backward readies.
    """

    def __init__(
        self, graph: GraphBuilder[Any], replicas: Mapping[int, InRecordedOrder] = MappingProxyType({})
    ) -> None:
        self._graph = graph
        self._replicas = replicas

    def lay_out_step(self, cursor: RankCursor, timeline: Timeline) -> None:
        """Add one step as it stood."""
        asked: dict[MessageEnd, int] = {}
        awaited: list[int] = []  # since the last computation, which will wait for them
        for item in timeline.items:
            if item.kind == Point.MESSAGE and item.message:
                asked[item.message] = self._ask(cursor, item, item.message, awaited)
            elif item.kind == Point.ARRIVED and item.message:
                self._graph.wait(cursor, item.name, asked[item.message])
                awaited.append(asked[item.message])
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
