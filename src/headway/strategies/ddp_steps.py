"""What a step of torch's DDP holds and lays out, for all strategies that are built on it.

It holds buckets, apart from the gradients unless ``gradient_as_bucket_view`` makes one of both. It lays out one
all-reduce a bucket, and one wait for all of them after backward. With find_unused_parameters what a backward leaves
without a gradient is ready as soon as it begins, and behind the last bucket ranks add up which parameters they used.

Codecs hold what error feedback keeps, as large as the buckets, and work on copies of those that are on their way. On
the CPU channels of their own encode, exchange and decode, one bucket at a time each, off the main thread. On a device
whose library is NCCL the hook casts on the stream that computes, and the process group's own all-reduces follow each
other.
"""

from __future__ import annotations

from collections import defaultdict

from headway.collectives.algorithms import ALL_REDUCE, GLOO_THREADS, NCCL
from headway.collectives.selection import Selection, native
from headway.compression.codec import MOST_EXCHANGES, element_bytes, slowdown_of, stretches_ns
from headway.graph.build import CODEC, GraphBuilder, RankCursor
from headway.graph.computation import Part
from headway.graph.step_layout import InRecordedOrder
from headway.job import Job
from headway.model import DTYPE_BYTES, ModelSpec
from headway.scheduling.buckets import Bucket, BucketReadiness, BucketSchedule, channel_of
from headway.scheduling.ddp_buckets import COMPRESSED_CHANNELS
from headway.strategies.footprint import Footprint

COPIES = 3  # of a bucket, while a codec computes


def footprint(model: ModelSpec, schedule: BucketSchedule, world_size: int) -> Footprint:
    """What one of ``world_size`` ranks holds."""
    del world_size
    sent = [bucket for bucket in schedule.buckets if bucket.wire is not None]
    kept_bytes = sum(_computed_bytes(bucket) for bucket in sent if bucket.wire and bucket.wire.feeds_back)
    copies_bytes = COMPRESSED_CHANNELS * COPIES * max(map(_computed_bytes, sent), default=0)
    return Footprint(
        buffers_bytes=sum(bucket.size_bytes for bucket in schedule.buckets) + kept_bytes + copies_bytes,
        state_bytes=model.optimizer_state_bytes,
        gradients_apart=model.pass_memory is None or model.pass_memory.gradients_apart,
        updated_share=1.0,
    )


def _computed_bytes(bucket: Bucket) -> int:
    return bucket.size_bytes // DTYPE_BYTES[bucket.dtype] * element_bytes(bucket.dtype)


class CompressedBuckets:
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
        channel = channel_of(self._counts[cursor.rank], self._channels)
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
        self._compressed = CompressedBuckets(graph)

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
            channel=channel_of(len(self._launched[cursor.rank]), self.at_a_time) if self.channels_apart else 0,
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
