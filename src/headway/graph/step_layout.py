"""Laying the steps of all ranks out in a graph, as a strategy has them computed.

A strategy that leaves computation as it was recorded reacts to points of it (``InRecordedOrder``). One that reorders,
splits, repeats or drops it lays blocks out itself (``StepLayout``; ``timeline.blocks_of``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from headway.collectives.algorithms import ALL_REDUCE, KINDS
from headway.graph.build import GraphBuilder, RankCursor, S
from headway.graph.timeline import Item, Part, Point, Timeline
from headway.scheduling.buckets import BucketSchedule

BLOCKING_A_STEP = 1_000_000  # more than any step has


class StepLayout(Protocol):
    """What a strategy makes of the steps of ranks."""

    def lay_out_step(self, cursor: RankCursor, timeline: Timeline) -> None:
        """Add one step of one rank to the graph: its computation, and what is launched and waited for between."""


class InRecordedOrder(ABC):
    """Computation as it was recorded, with a strategy's reactions to the points of every rank's timeline."""

    def __init__(self, graph: GraphBuilder[BucketSchedule]) -> None:
        self._graph = graph

    def use(self, cursor: RankCursor, module: str) -> None:  # noqa: B027 - most have parameters whole at any time
        """Forward is about to need the parameters of ``module``; by default they are there."""

    def use_all(self, cursor: RankCursor) -> None:  # noqa: B027 - as above
        """Forward begins, and nothing says which parameters it needs when; by default all are there."""

    @abstractmethod
    def ready(self, cursor: RankCursor, parameter: str) -> None:
        """The gradient of ``parameter`` is complete on this rank."""

    def unused(self, cursor: RankCursor, parameter: str) -> None:
        """This backward, whose first gradient is about to be complete, leaves ``parameter`` without one.

        By default that is a gradient of zeros, which is ready.
        """
        self.ready(cursor, parameter)

    @abstractmethod
    def backward_end(self, cursor: RankCursor) -> None:
        """The computation of a synchronising backward is done."""

    def finalize(self, cursor: RankCursor, duration_ns: int) -> None:
        """What the recorded strategy did after its gradients had arrived; by default this one does the same."""
        self._graph.compute(cursor, Part.FINALIZE, duration_ns)

    def read(self, cursor: RankCursor, read: Item) -> None:
        """The script reads gradients, which takes one rank ``read.duration_ns`` for all of those that it reads.

        By default they are there when backward returns.
        """
        self._graph.compute(cursor, Part.READ, read.duration_ns)

    def optimizer(self, cursor: RankCursor, duration_ns: int) -> None:
        """The optimizer steps, which takes ``duration_ns`` for all parameters; by default at once, on all of them."""
        self._graph.compute(cursor, Part.OPTIMIZER, duration_ns)

    def lay_out_step(self, cursor: RankCursor, timeline: Timeline) -> None:
        """Add the recorded computation in its order, and ask the strategy at every point."""
        graph = self._graph
        blocking: Counter[tuple[int, ...]] = Counter()
        optimizer_ns = timeline.optimizer_ns
        for item in timeline.items:
            match item.kind:
                case Point.USE:
                    self.use(cursor, item.name)
                case Point.READY:
                    self.ready(cursor, item.name)
                case Point.UNUSED:
                    self.unused(cursor, item.name)
                case Point.BACKWARD_END:
                    self.backward_end(cursor)
                case Point.BLOCKING:
                    kind = item.name if item.name in KINDS else ALL_REDUCE
                    members = item.members or None
                    # Members use a key once, whichever step it is in; of all ranks each step has its own.
                    key = blocking[item.members] + (cursor.step * BLOCKING_A_STEP if members else 0)
                    number = graph.launch(
                        cursor,
                        item.name,
                        key,
                        item.size_bytes,
                        bucket=-1,
                        selection=graph.selection_of(kind, item.size_bytes, members),
                        members=members,
                    )
                    graph.wait(cursor, item.name, number)
                    blocking[item.members] += 1
                case Point.STEP:
                    self.optimizer(cursor, optimizer_ns)
                    optimizer_ns = 0
                case Part.READ:
                    self.read(cursor, item)
                case Part.FINALIZE:
                    self.finalize(cursor, item.duration_ns)
                case Part.OPTIMIZER:
                    pass  # played at the STEP point, where and when the strategy wants it
                case _:
                    graph.compute(cursor, item.kind, item.duration_ns)


def lay_out_ranks(graph: GraphBuilder[S], layout: StepLayout, ranks: Sequence[Sequence[Timeline]]) -> None:
    """Have ``layout`` lay out the timelines of every rank (``ranks[rank][position]``)."""
    for rank, timelines in enumerate(ranks):
        cursor = RankCursor(rank)
        for position, timeline in enumerate(timelines):
            cursor.step = position
            layout.lay_out_step(cursor, timeline)
            graph.boundary(cursor)
