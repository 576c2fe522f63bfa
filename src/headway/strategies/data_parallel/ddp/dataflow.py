"""What DDP adds to the graph: one all-reduce a bucket, and one wait for all of them after backward."""

from __future__ import annotations

from collections import defaultdict

from headway.collectives.algorithms import ALL_REDUCE, GLOO_THREADS, NCCL
from headway.collectives.selection import Selection, native
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
        launched, at_a_time = self._launched[walk.rank], self.at_a_time
        key = self._passes[walk.rank] * len(self._graph.schedule.buckets) + index
        number = self._graph.launch(
            walk, ALL_REDUCE, key, bucket.size_bytes, bucket=index,
            selection=self.selection(bucket.size_bytes),
            channel=len(launched) % at_a_time if self.channels_apart else 0,
            after=launched[-at_a_time : len(launched) - at_a_time + 1],
        )  # fmt: skip
        launched.append(number)

    @property
    def at_a_time(self) -> int:
        """How many all-reduces are under way at a time; each follows the one so many before it."""
        return 1 if self._graph.cluster.library == NCCL else GLOO_THREADS

    @property
    def channels_apart(self) -> bool:
        """Whether those under way at a time have connections of their own."""
        return False

    def selection(self, size_bytes: int) -> Selection:
        """What carries out the all-reduce of a bucket."""
        return native(ALL_REDUCE, size_bytes, self._graph.world_size, self._graph.cluster.library)

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
