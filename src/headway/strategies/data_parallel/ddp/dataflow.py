"""What DDP adds to the graph: one all-reduce a bucket, and one wait for all of them after backward."""

from __future__ import annotations

from collections import defaultdict

from headway.collectives.algorithms import GLOO_ALL_REDUCE, GLOO_THREADS
from headway.graph.build import GraphBuilder, Walk
from headway.graph.timeline import Part


class Dataflow:
    """DDP's reactions: a bucket is reduced when it is full and every bucket before it has been launched."""

    def __init__(self, graph: GraphBuilder) -> None:
        self._graph = graph
        self._bucket_of = graph.schedule.bucket_of
        self._missing = self._full_counts()
        self._launched: dict[int, list[int]] = defaultdict(list)
        self._counts: dict[int, dict[int, int]] = {}
        self._next: dict[int, int] = defaultdict(int)
        self._passes: dict[int, int] = defaultdict(int)

    def _full_counts(self) -> dict[int, int]:
        return {bucket.index: len(bucket.parameters) for bucket in self._graph.schedule.buckets}

    def use(self, walk: Walk, module: str) -> None:
        """Parameters are whole whenever forward runs."""

    def ready(self, walk: Walk, parameter: str) -> None:
        """Count down the parameter's bucket, and launch what may be launched, in order."""
        bucket_index = self._bucket_of.get(parameter)
        if bucket_index is None:
            return
        missing = self._counts.setdefault(walk.rank, dict(self._missing))
        missing[bucket_index] -= 1
        buckets = self._graph.schedule.buckets
        while self._next[walk.rank] < len(buckets) and missing[self._next[walk.rank]] <= 0:
            self._launch(walk, self._next[walk.rank])
            self._next[walk.rank] += 1

    def _launch(self, walk: Walk, index: int) -> None:
        bucket = self._graph.schedule.buckets[index]
        launched = self._launched[walk.rank]
        key = self._passes[walk.rank] * len(self._missing) + index
        number = self._graph.launch(
            walk, "all_reduce", key, bucket.size_bytes, bucket=index, algorithm=GLOO_ALL_REDUCE,
            after=launched[-GLOO_THREADS : len(launched) - GLOO_THREADS + 1],
        )  # fmt: skip
        launched.append(number)

    def backward_end(self, walk: Walk) -> None:
        """Wait for every bucket of this backward."""
        count = self._next[walk.rank]
        for number in self._launched[walk.rank][-count:] if count else []:
            self._graph.wait(walk, "gradients", number)
        self._graph.compute(walk, Part.FINALIZE, 0)
        self._counts[walk.rank] = dict(self._missing)
        self._next[walk.rank] = 0
        self._passes[walk.rank] += 1

    def finalize(self, walk: Walk, duration_ns: int) -> None:
        """Buckets are copied back to gradients."""
        self._graph.compute(walk, Part.FINALIZE, duration_ns)

    def optimizer(self, walk: Walk, duration_ns: int) -> None:
        """The optimizer steps at once."""
        self._graph.compute(walk, Part.OPTIMIZER, duration_ns)
