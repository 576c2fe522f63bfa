"""What DDP adds to the graph: one all-reduce a bucket, and one wait for all of them after backward."""

from __future__ import annotations

from collections import defaultdict

from headway.collectives.algorithms import ALL_REDUCE, GLOO_THREADS
from headway.collectives.selection import native
from headway.graph.build import GraphBuilder, Walk
from headway.graph.timeline import Part
from headway.scheduling.filling import Filling


class Dataflow:
    """DDP's reactions: a bucket is reduced when it is full and every bucket before it has been launched."""

    def __init__(self, graph: GraphBuilder) -> None:
        self._graph = graph
        self._fillings = [Filling(graph.schedule) for _ in range(graph.ranks)]
        self._launched: dict[int, list[int]] = defaultdict(list)
        self._passes: dict[int, int] = defaultdict(int)

    def use(self, walk: Walk, module: str) -> None:
        """Parameters are whole whenever forward runs."""

    def ready(self, walk: Walk, parameter: str) -> None:
        """Count down the parameter's bucket, and launch what may be launched, in order."""
        for index in self._fillings[walk.rank].ready(parameter):
            self._launch(walk, index)

    def _launch(self, walk: Walk, index: int) -> None:
        bucket = self._graph.schedule.buckets[index]
        launched = self._launched[walk.rank]
        key = self._passes[walk.rank] * len(self._graph.schedule.buckets) + index
        number = self._graph.launch(
            walk, ALL_REDUCE, key, bucket.size_bytes, bucket=index,
            selection=native(ALL_REDUCE, bucket.size_bytes, self._graph.world_size),
            after=launched[-GLOO_THREADS : len(launched) - GLOO_THREADS + 1],
        )  # fmt: skip
        launched.append(number)

    def backward_end(self, walk: Walk) -> None:
        """Wait for every bucket of this backward."""
        count = self._fillings[walk.rank].next
        for number in self._launched[walk.rank][-count:] if count else []:
            self._graph.wait(walk, "gradients", number)
        self._graph.compute(walk, Part.FINALIZE, 0)
        self._fillings[walk.rank].restart()
        self._passes[walk.rank] += 1

    def finalize(self, walk: Walk, duration_ns: int) -> None:
        """Buckets are copied back to gradients."""
        self._graph.compute(walk, Part.FINALIZE, duration_ns)

    def optimizer(self, walk: Walk, duration_ns: int) -> None:
        """The optimizer steps at once."""
        self._graph.compute(walk, Part.OPTIMIZER, duration_ns)
