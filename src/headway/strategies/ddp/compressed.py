"""Compressed buckets, live: a communication hook of DDP whose channels encode, exchange and decode.

A bucket is one job of a channel: the thread that trains only queues it. So what it takes to encode is concurrent with
backward, several exchanges of a bucket follow each other in the same order on all ranks, and no thread of the process
group waits for another one's collective.
"""

from __future__ import annotations

import time
import zlib
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from headway.collectives import native
from headway.collectives.algorithms import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COMPRESSED
from headway.compression.codec import MOST_EXCHANGES, Codec, Sent
from headway.plugins import PluginFaultError, is_own
from headway.scheduling.ddp_buckets import COMPRESSED_CHANNELS
from headway.strategies.ddp.feedback import Feedback
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.ddp.sending import Outgoing, computed_type, send
from headway.strategies.live.channels.communication import Job
from headway.strategies.live.channels.hooked import HookedChannels
from headway.strategies.live.channels.observer import Collective, observer

MOST_BUCKETS = 2**20


class _Bucket(Job):
    tells_itself = True


class Compressing(HookedChannels):
    """What sends the buckets of one wrapped model as a strategy says. Collective."""

    def __init__(self, wrapped: DistributedDataParallel, strategy: DistributedDataParallelStrategy) -> None:
        super().__init__(wrapped, COMPRESSED_CHANNELS, strategy.name)
        trained = [(name, p) for name, p in wrapped.module.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in trained]
        self.feedback = Feedback()
        self._keys = {id(parameter): key for key, (_, parameter) in enumerate(trained)}
        self._strategy = strategy
        self._feeds_back = any(codec is not None and codec.feeds_back for codec in strategy.wire)
        self._told: dict[int, int] = {}  # how many collectives of each bucket and place in it were told of
        self._some_unused = bool(wrapped.find_unused_parameters)
        self._overflowed = False  # in the backward that is in flight, or was last
        self._compared = False

    def reduce(self, bucket: Any) -> torch.futures.Future[Any]:
        """DDP's communication hook, for a ``dist.GradBucket``."""
        buffer: torch.Tensor = bucket.buffer()
        codec = self._strategy.wire_of(bucket.index())
        if bucket.index() == 0:
            self.forget_what_was_skipped()
        if codec is None:
            return self._as_it_is(buffer)
        parameters = bucket.parameters()
        keys, shapes = [self._keys[id(p)] for p in parameters], [tuple(p.shape) for p in parameters]
        kept = None
        if codec.feeds_back:
            kept = self.feedback.of(keys, [p.numel() for p in parameters], computed_type(buffer))
        outgoing = Outgoing(buffer, kept, shapes, keys, self._some_unused)
        compares = not self._compared and not is_own(codec)
        self._compared = self._compared or compares
        work = partial(self._send, codec, outgoing, bucket.index(), time.monotonic_ns(), compares)
        size_bytes = buffer.numel() * buffer.element_size()
        return self.submit(_Bucket(ALL_REDUCE, bucket.index(), size_bytes, work), buffer)

    def forget_what_was_skipped(self) -> None:
        """Where the last backward overflowed its step is skipped: what it kept is of no step that was made."""
        if self._overflowed:
            self._overflowed = False
            self.feedback.forget_all()

    def _as_it_is(self, buffer: torch.Tensor) -> torch.futures.Future[Any]:
        self.check_divisor()
        work = dist.all_reduce(buffer.div_(self.world_size), group=self.group, async_op=True)
        assert work is not None

        def received(done: torch.futures.Future[Any]) -> torch.Tensor:
            mean: torch.Tensor = done.value()[0]
            if self._feeds_back and not bool(mean.sum().isfinite()):
                self._overflowed = True  # other buckets may not show it
            return mean

        future: torch.futures.Future[Any] = work.get_future().then(received)
        return future

    def _send(
        self, codec: Codec, bucket: Outgoing, index: int, asked_ns: int, compares: bool, channel: int
    ) -> None:
        telling = _Telling(self, self._groups.host[channel], index, asked_ns)
        finite = send(codec, bucket, telling.exchange, self.feedback.memory, self.rank, self.world_size)
        telling.tell(time.monotonic_ns())
        if not finite:
            self.feedback.forget(bucket.keys)
            self._overflowed = True
        if compares:
            self._compare(codec, bucket.buffer, channel, finite=finite)

    def _compare(self, codec: Codec, mean: torch.Tensor, channel: int, *, finite: bool) -> None:
        """Raise PluginFaultError where ranks have different bits of a ``mean`` that another package's codec made.

        Their models would drift apart silently. What is not finite may differ: such a step is skipped.
        """
        digest = zlib.crc32(mean.detach().contiguous().view(torch.uint8).numpy().data) if finite else -1
        digests = native.gathered(torch.tensor([digest]), self._groups.host[channel]).view(-1).tolist()
        other = next((rank for rank, each in enumerate(digests) if each != digests[0]), None)
        if other is not None:
            what = "the means of one bucket differ between ranks"
            raise PluginFaultError("codec", codec, f"{what} 0 and {other}, expected the same bits on all")

    def told(self, index: int, number: int) -> int:
        """A sequence number for collective ``number`` of bucket ``index``, whichever channel is first."""
        place = index * MOST_EXCHANGES + number
        times = self._told[place] = self._told.get(place, -1) + 1
        return times * MOST_BUCKETS * MOST_EXCHANGES + place


class _Telling:
    """Exchanges of one bucket, each told to the observer when the next one begins.

    The last one ends when what it brought is decoded: that is when backward may go on.
    """

    def __init__(self, compressing: Compressing, group: dist.ProcessGroup, index: int, asked_ns: int) -> None:
        self._compressing, self._group, self._index = compressing, group, index
        self._asked_ns = self._start_ns = asked_ns
        self._end_ns = 0
        self._number = -1
        self._kind, self._size_bytes = "", 0

    def exchange(self, sent: Sent) -> torch.Tensor:
        """Carry out one collective of a codec."""
        if self._number >= 0:
            self.tell(self._end_ns)
            self._asked_ns = time.monotonic_ns()
        self._number += 1
        self._start_ns = time.monotonic_ns()
        result = EXCHANGES[sent.kind](sent.operand, self._group)
        self._end_ns = time.monotonic_ns()
        self._kind, self._size_bytes = sent.kind, result.numel() * result.element_size()
        return result

    def tell(self, end_ns: int) -> None:
        """Tell of the latest one."""
        observer().collective(
            Collective(
                self._kind, self._index, self._size_bytes, COMPRESSED, self._asked_ns, self._start_ns, end_ns,
                self._compressing.told(self._index, self._number), DistributedDataParallelStrategy.name,
            )
        )  # fmt: skip


EXCHANGES = {ALL_REDUCE: native.summed, ALL_GATHER: native.gathered, ALL_TO_ALL: native.exchanged}


def send_bucket(compressing: Compressing, bucket: Any) -> torch.futures.Future[Any]:
    """DDP's communication hook."""
    return compressing.reduce(bucket)


send_bucket.__annotations__.clear()  # DDP compares them with types, and here they are names
