"""What parameter servers add to the graph: a push, a sum and a pull a key, and one wait after backward."""

from __future__ import annotations

from headway.collectives.algorithms import ALL_REDUCE, SERVERS
from headway.collectives.selection import Selection
from headway.graph.build import GraphBuilder
from headway.job import Job
from headway.scheduling.buckets import BucketSchedule
from headway.strategies import ddp_steps as ddp


class Reactions(ddp.Reactions):
    """DDP's reactions, with other all-reduces: each channel has connections of its own and serves one at a time."""

    def __init__(self, graph: GraphBuilder[BucketSchedule], job: Job) -> None:
        super().__init__(graph, job)
        graph.schedule.serving.check(graph.world_size)

    @property
    def at_a_time(self) -> int:
        """One a channel."""
        return self._graph.schedule.channels

    @property
    def channels_apart(self) -> bool:
        """Every channel has a process group of its own."""
        return True

    def selection(self, size_bytes: int) -> Selection:
        """Push and pull."""
        serving = self._graph.schedule.serving
        return Selection(SERVERS, ALL_REDUCE, serving.pieces, shares=serving.shares)
