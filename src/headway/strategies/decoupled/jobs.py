"""Jobs of the decoupled runtime in the graph: what each channel of a rank carries, one at a time and in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from headway.collectives.algorithms import ALL_GATHER, ALL_REDUCE, RING
from headway.collectives.selection import Selection
from headway.compression.costs import slowdown_of, stretches_ns
from headway.graph.build import CODEC, GraphBuilder, RankCursor
from headway.scheduling.buckets import BucketSchedule


class Jobs:
    """Job number ``n`` of a rank is served by its channel ``n % channels``."""

    def __init__(self, graph: GraphBuilder[BucketSchedule]) -> None:
        self._graph = graph
        self._schedule = graph.schedule
        self._hosts = graph.hosts
        self._selected: dict[tuple[str, int], Selection] = {}  # by half and bytes
        self._counts: dict[int, int] = defaultdict(int)  # rank -> how many jobs it has asked for
        self._latest: dict[int, list[int]] = defaultdict(
            list
        )  # rank -> its latest jobs, one a channel at most
        self._others: dict[int, int] = defaultdict(int)  # rank -> collectives of no bucket

    def of_bucket(
        self,
        cursor: RankCursor,
        name: str,
        index: int,
        passes: int,
        after: Sequence[int] = (),
        after_work: Sequence[int] = (),
    ) -> int:
        """Queue the half ``name`` of a bucket in backward number ``passes``. Returns the collective's number."""
        bucket = self._schedule.buckets[index]
        size_bytes = self._schedule.half_bytes(name, bucket)
        if (cast := self._schedule.cast_in(name)) is not None:
            # From and to the type that is sent, on the channel's thread; all of it before, as it adds up to as much.
            cluster = self._graph.cluster
            cast_ns = sum(stretches_ns(cast, cluster, bucket.size_bytes, 1))
            casting = self._graph.work(
                cursor, cast_ns, bucket=index, after=[*self.before(cursor), *after], after_work=after_work,
                kind=CODEC, slowdown=slowdown_of(cast, cluster),
            )  # fmt: skip
            after_work = [casting]
        key = passes * len(self._schedule.buckets) + index
        return self._submit(
            cursor, name, key, size_bytes, index, self._select(name, size_bytes), after, after_work
        )

    def _select(self, name: str, size_bytes: int) -> Selection:
        if (name, size_bytes) not in self._selected:
            graph = self._graph
            select = self._schedule.algorithms.select
            selected = select(name, size_bytes, graph.world_size, graph.cluster.library)
            self._selected[name, size_bytes] = selected.on(self._hosts)
        return self._selected[name, size_bytes]

    def exchange(self, cursor: RankCursor, size_bytes: int) -> int:
        """Queue the sum over ranks of a small tensor. Returns the collective's number."""
        return self._submit(
            cursor, ALL_REDUCE, self._key(cursor), size_bytes, -1, Selection(RING, ALL_REDUCE)
        )

    def ask(self, cursor: RankCursor, size_bytes: int, after: Sequence[int]) -> int:
        """Ask the other ranks for their shares of ``size_bytes``, over connections of their own, as in one ring.

        They answer after the collectives ``after``. Returns the collective's number.
        """
        return self._graph.launch(
            cursor, ALL_GATHER, self._key(cursor), size_bytes, bucket=-1, selection=Selection(RING, ALL_GATHER),
            channel=self._schedule.channels, after=after,
        )  # fmt: skip

    def before(self, cursor: RankCursor) -> list[int]:
        """The job before the next one on its channel."""
        jobs = self._latest[cursor.rank]
        return jobs[:1] if len(jobs) == self._schedule.channels else []

    def _key(self, cursor: RankCursor) -> int:
        self._others[cursor.rank] += 1
        return -self._others[cursor.rank]

    def _submit(
        self,
        cursor: RankCursor,
        name: str,
        key: int,
        size_bytes: int,
        bucket: int,
        selection: Selection,
        after: Sequence[int] = (),
        after_work: Sequence[int] = (),
    ) -> int:
        count = self._counts[cursor.rank]
        self._counts[cursor.rank] += 1
        number = self._graph.launch(
            cursor,
            name,
            key,
            size_bytes,
            bucket=bucket,
            selection=selection,
            channel=count % self._schedule.channels,
            after=[*self.before(cursor), *after],
            after_work=after_work,
        )
        self._latest[cursor.rank] = [*self._latest[cursor.rank], number][-self._schedule.channels :]
        return number
