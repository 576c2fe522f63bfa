"""What buckets that a codec sends add to the graph: encoding, exchanges, decoding, as ``compressed`` does them live.

On the CPU channels of their own do all of it, one bucket at a time each, off the main thread. On a device whose library
is NCCL the hook casts on the stream that computes, and the process group's own all-reduces follow each other.
"""

from __future__ import annotations

from collections import defaultdict

from headway.collectives.algorithms import NCCL
from headway.collectives.selection import native
from headway.compression.codec import MOST_EXCHANGES, slowdown_of, stretches_ns
from headway.graph.build import CODEC, GraphBuilder, RankCursor
from headway.graph.computation import Part
from headway.scheduling.buckets import Bucket, BucketSchedule
from headway.strategies.ddp.policy import COMPRESSED_CHANNELS


class Compressed:
    """Compressed buckets of all ranks."""

    def __init__(self, graph: GraphBuilder[BucketSchedule]) -> None:
        self._graph = graph
        self._on_device = graph.cluster.library == NCCL
        self._channels = 1 if self._on_device else COMPRESSED_CHANNELS
        self._counts: dict[int, int] = defaultdict(int)  # rank -> how many buckets it has sent
        self._tails: dict[tuple[int, int], int] = {}  # rank and channel -> the last operation there

    def launch(self, cursor: RankCursor, bucket: Bucket, key: int) -> tuple[int, int]:
        """Send ``bucket``. Returns the number of its last collective, and the operation of what decodes that."""
        graph, codec = self._graph, bucket.wire
        assert codec is not None
        channel = self._counts[cursor.rank] % self._channels
        self._counts[cursor.rank] += 1
        stretches = stretches_ns(codec, graph.cluster, bucket.size_bytes, len(bucket.exchanges))
        slowdown = slowdown_of(codec, graph.cluster)
        before = self._tails.get((cursor.rank, channel))
        after_work = [] if before is None else [before]
        if self._on_device:
            graph.compute(cursor, Part.BACKWARD, stretches[0], bucket.index)
            stretches[0] = 0
        number, operation = -1, -1
        for stretch, each in enumerate(bucket.exchanges):
            operation = graph.work(
                cursor, stretches[stretch], bucket=bucket.index, kind=CODEC, slowdown=slowdown,
                after=[number] if number >= 0 else [], after_work=after_work,
            )  # fmt: skip
            selection = native(each.kind, each.size_bytes, graph.world_size, graph.cluster.library)
            number = graph.launch(
                cursor, each.kind, key * MOST_EXCHANGES + stretch, each.size_bytes, bucket=bucket.index,
                selection=selection, channel=1 + channel, after_work=[operation],
            )  # fmt: skip
            after_work = []
        decoded = graph.work(
            cursor, stretches[-1], bucket=bucket.index, kind=CODEC, slowdown=slowdown, after=[number]
        )
        self._tails[cursor.rank, channel] = decoded
        return number, decoded
