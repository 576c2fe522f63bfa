"""What DDP adds to the graph: one all-reduce a bucket, and one wait for all of them after backward.

Buckets that a codec sends take a way of their own (``compressed_reactions``).

With find_unused_parameters what a backward leaves without a gradient is ready as soon as it begins, and behind the last
bucket ranks add up which parameters they used.
"""

from __future__ import annotations

from collections import defaultdict

from headway.collectives.algorithms import ALL_REDUCE, GLOO_THREADS, NCCL
from headway.collectives.selection import Selection, native
from headway.graph.build import GraphBuilder, RankCursor
from headway.graph.computation import Part
from headway.graph.step_layout import InRecordedOrder
from headway.job import Job
from headway.scheduling.buckets import BucketReadiness, BucketSchedule
from headway.strategies.ddp.compressed_reactions import Compressed


class Reactions(InRecordedOrder):
    """DDP's reactions: a bucket is reduced when it is full and every bucket before it has been launched."""

    def __init__(self, graph: GraphBuilder[BucketSchedule], job: Job) -> None:
        super().__init__(graph)
        self._model = job.model
        self._fillings = [BucketReadiness(graph.schedule) for _ in range(graph.ranks)]
        self._launched: dict[int, list[int]] = defaultdict(list)
        self._awaited: dict[int, list[int]] = defaultdict(list)  # by this backward
        self._awaited_work: dict[int, list[int]] = defaultdict(list)  # likewise
        self._passes: dict[int, int] = defaultdict(int)
        self._compressed = Compressed(graph)

    def ready(self, cursor: RankCursor, parameter: str) -> None:
        """Count down the parameter's bucket, and launch what may be launched, in order."""
        filling = self._fillings[cursor.rank]
        launched = filling.ready(parameter)
        for index in launched:
            self._launch(cursor, index)
        if launched and filling.complete and self._model.find_unused_parameters:
            self._exchange_uses(cursor)

    def _launch(self, cursor: RankCursor, index: int) -> None:
        bucket = self._graph.schedule.buckets[index]
        key = self._passes[cursor.rank] * len(self._graph.schedule.buckets) + index
        if bucket.wire is not None:
            number, decoded = self._compressed.launch(cursor, bucket, key)
            self._awaited[cursor.rank].append(number)
            self._awaited_work[cursor.rank].append(decoded)
            return
        number = self._graph.launch(
            cursor, ALL_REDUCE, key, bucket.size_bytes, bucket=index,
            selection=self.selection(bucket.size_bytes),
            channel=len(self._launched[cursor.rank]) % self.at_a_time if self.channels_apart else 0,
            after=self._before(cursor),
        )  # fmt: skip
        self._launched[cursor.rank].append(number)
        self._awaited[cursor.rank].append(number)

    def _before(self, cursor: RankCursor) -> list[int]:
        """The all-reduce that the next one follows."""
        launched = self._launched[cursor.rank]
        return launched[-self.at_a_time : len(launched) - self.at_a_time + 1]

    def _exchange_uses(self, cursor: RankCursor) -> None:
        """Add up over ranks what was used, on the process group itself."""
        graph, size_bytes = self._graph, self._model.uses_bytes
        number = graph.launch(
            cursor, ALL_REDUCE, -1 - self._passes[cursor.rank], size_bytes, bucket=-1,
            selection=native(ALL_REDUCE, size_bytes, graph.world_size, graph.cluster.library),
            channel=self.at_a_time if self.channels_apart else 0,
            after=[] if self.channels_apart else self._before(cursor),
        )  # fmt: skip
        if not self.channels_apart:
            self._launched[cursor.rank].append(number)
        self._awaited[cursor.rank].append(number)

    @property
    def at_a_time(self) -> int:
        """How many all-reduces are in flight at a time; each follows the one so many before it."""
        return 1 if self._graph.cluster.library == NCCL else GLOO_THREADS

    @property
    def channels_apart(self) -> bool:
        """Whether those in flight at a time have connections of their own."""
        return False

    def selection(self, size_bytes: int) -> Selection:
        """What carries out the all-reduce of a bucket."""
        return native(ALL_REDUCE, size_bytes, self._graph.world_size, self._graph.cluster.library)

    def backward_end(self, cursor: RankCursor) -> None:
        """Wait for every bucket of this backward, and for what was used."""
        for number in self._awaited[cursor.rank]:
            self._graph.wait(cursor, "gradients", number)
        self._awaited[cursor.rank].clear()
        for operation in self._awaited_work[cursor.rank]:
            self._graph.wait_for_work(cursor, operation)
        self._awaited_work[cursor.rank].clear()
        self._graph.compute(cursor, Part.FINALIZE, 0)
        self._fillings[cursor.rank].restart()
        self._passes[cursor.rank] += 1
