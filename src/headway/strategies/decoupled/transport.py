"""Transport: buckets' collectives, from a job in a channel's queue to what carries it out.

In memory that is a chunk program, prepared once for every channel; on a device it is the process group's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from headway import torch_private
from headway.collectives import live
from headway.collectives.algorithms import ALL_GATHER, ALL_REDUCE, NATIVE, REDUCE_SCATTER, RING
from headway.collectives.hierarchical import Hosts
from headway.collectives.live import Run, prepare
from headway.collectives.program import scratch_numel
from headway.collectives.selection import Selection
from headway.compression.cast import Cast
from headway.errors import CommunicationError, HeadwayError
from headway.scheduling.buckets import BucketSchedule
from headway.strategies.decoupled.buckets import LiveBucket
from headway.strategies.decoupled.condition import Condition
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.live.channels.communication import (
    Channels,
    Culprit,
    Disagreement,
    Job,
    own_work,
)
from headway.strategies.live.channels.stream_channels import StreamChannels
from headway.strategies.live.channels.streams import Streams
from headway.strategies.live.channels.wiring import OwnGroups, Wiring

TAGS = 2**30  # messages are told apart among so many collectives
STEPS_TOLD_APART = 4
TO_SAVE = (
    "To save this rank's parameters as of the last complete step, call recover() on the wrapped model, "
    "and then state_dict()."
)
EXCHANGED = 1  # the tag of what is no collective


class Collectives(Protocol):
    """Reduce-scatters and all-gathers of buckets."""

    def bound(self, kind: str, bucket: LiveBucket, channel: int) -> Callable[[int], object]:
        """What runs a collective of ``bucket`` on ``channel``; called with its tag."""

    def tag(self, kind: str, bucket: LiveBucket, number: int) -> int:
        """What the messages of the ``number``-th collective of that kind of ``bucket`` carry."""

    def algorithm(self, kind: str, bucket: LiveBucket) -> str:
        """What carries out a collective of ``bucket``."""

    def size_bytes(self, kind: str, bucket: LiveBucket) -> int:
        """The size of what is sent."""


class BackendCollectives:
    """The process groups' own collectives, on the current stream; they return when given to the device."""

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = groups

    def bound(self, kind: str, bucket: LiveBucket, channel: int) -> Callable[[int], object]:
        """What runs a collective of ``bucket`` on ``channel``; NCCL counts for itself."""
        collective, group = live.COLLECTIVES[kind], self._groups[channel]
        return lambda _tag: collective(bucket.buffer, group, bucket.buffer)

    def tag(self, kind: str, bucket: LiveBucket, number: int) -> int:
        """None."""
        del kind, bucket, number
        return 0

    def algorithm(self, kind: str, bucket: LiveBucket) -> str:
        """The backend's own, whatever a schedule says."""
        del kind, bucket
        return NATIVE

    def size_bytes(self, kind: str, bucket: LiveBucket) -> int:
        """That of the bucket: nothing is cast."""
        del kind
        return bucket.size_bytes


class Casting:
    """A half of a bucket whose gradients are cast for it: ``run`` works on ``sent``, a copy."""

    def __init__(self, kind: str, bucket: LiveBucket, sent: torch.Tensor, run: Run) -> None:
        self._buffer, self._sent, self._run = bucket.buffer, sent, run
        gathers = kind == ALL_GATHER
        self._brought: slice = bucket.own if gathers else slice(None)
        self._taken: slice = slice(None) if gathers else bucket.own

    def __call__(self, tag: int = 0) -> None:
        """Cast what this rank brings, run, and cast back; after a gather its own part too: all have the same."""
        self._sent[self._brought].copy_(self._buffer[self._brought])
        self._run(tag)
        self._buffer[self._taken].copy_(self._sent[self._taken])


def _copy_of(bucket: LiveBucket, cast: Cast | None) -> torch.Tensor:
    """What halves of ``bucket`` are run on whose elements are cast; its buffer where none are."""
    if cast is None:
        return bucket.buffer
    return torch.zeros_like(bucket.buffer, dtype=getattr(torch, cast.dtype))


Prepare = Callable[[Selection, torch.Tensor, torch.Tensor, int], Run]
"""(selection, flat tensor, scratch, channel) to what is run on that channel."""


class ChunkProgramCollectives:
    """Reduce-scatters and all-gathers of buckets in memory, as a schedule selects them, over the channels' groups."""

    def __init__(
        self,
        buckets: Sequence[LiveBucket],
        prepare: Prepare,
        schedule: BucketSchedule,
        world_size: int,
        hosts: Hosts,
    ) -> None:
        self._prepare = prepare
        self._halves = {
            (kind, bucket): schedule.half_bytes(kind, schedule.buckets[bucket.index])
            for bucket in buckets
            for kind in (REDUCE_SCATTER, ALL_GATHER)
        }
        copies = {bucket: _copy_of(bucket, schedule.halves) for bucket in buckets}
        self._sent = {
            (kind, bucket): bucket.buffer if schedule.cast_in(kind) is None else copies[bucket]
            for bucket in buckets
            for kind in (REDUCE_SCATTER, ALL_GATHER)
        }
        self._selected = {
            (kind, bucket): schedule.algorithms.select(kind, self._halves[kind, bucket], world_size).on(hosts)
            for bucket in buckets
            for kind in (REDUCE_SCATTER, ALL_GATHER)
        }
        needed: dict[torch.dtype, int] = {}
        for place, selection in self._selected.items():
            sent = self._sent[place]
            numel = selection.scratch_numel(sent.numel(), world_size)
            needed[sent.dtype] = max(numel, needed.get(sent.dtype, 0))
        self._scratch = [
            {d: torch.empty(n, dtype=d, device="cpu") for d, n in needed.items()}
            for _ in range(schedule.channels)
        ]
        self._prepared: dict[tuple[str, LiveBucket, int], Run] = {}

    def bound(self, kind: str, bucket: LiveBucket, channel: int) -> Callable[[int], object]:
        """What runs a collective of ``bucket`` on ``channel``, and returns when this rank has done its part."""
        key = (kind, bucket, channel)
        if key not in self._prepared:
            sent = self._sent[kind, bucket]
            scratch = self._scratch[channel][sent.dtype]
            run = self._prepare(self._selected[kind, bucket], sent, scratch, channel)
            self._prepared[key] = run if sent is bucket.buffer else Casting(kind, bucket, sent, run)
        return self._prepared[key]

    def size_bytes(self, kind: str, bucket: LiveBucket) -> int:
        """As it is sent."""
        return self._halves[kind, bucket]

    def tag(self, kind: str, bucket: LiveBucket, number: int) -> int:
        """Messages say which collective of which bucket they are of: ranks that disagree on that time out."""
        return 2 + ((number * len(self._selected) // 2 + bucket.index) * 2 + (kind == ALL_GATHER)) % TAGS

    def algorithm(self, kind: str, bucket: LiveBucket) -> str:
        """What the schedule selects."""
        return self._selected[kind, bucket].algorithm


class BucketJob(Job):
    """A collective of a bucket, between ``before`` and ``behind`` on the same thread or stream."""

    def __init__(
        self,
        kind: str,
        bucket: LiveBucket,
        collectives: Collectives,
        before: Callable[[], None] | None,
        after: Sequence[Job],
        behind: Callable[[], None] | None,
        steps: int,
    ) -> None:
        super().__init__(
            kind, bucket.index, collectives.size_bytes(kind, bucket), after=after,
            algorithm=collectives.algorithm(kind, bucket),
        )  # fmt: skip
        self.steps = steps
        number = bucket.gathers if kind == ALL_GATHER else bucket.reductions
        # Ranks of which one has stepped and another has not must not add up, or get, what is not of one step.
        self.tag = collectives.tag(kind, bucket, number * STEPS_TOLD_APART + steps % STEPS_TOLD_APART)
        self._collectives: Collectives | None = collectives
        self._on: LiveBucket | None = bucket
        self._before, self._behind = before, behind
        self._fence = bucket.fence.acquire_on_host()

    def bound(self, channel: int) -> Callable[[int], object]:
        """The collective itself."""
        assert self._collectives is not None
        assert self._on is not None
        return self._collectives.bound(self.name, self._on, channel)

    @contextmanager
    def around(self) -> Iterator[None]:
        """The use of the buffer, with what is done before the collective and behind it."""
        with self._fence:
            if self._before is not None:
                with own_work():
                    self._before()
            yield
            if self._behind is not None:
                with own_work():
                    self._behind()

    def let_go(self) -> None:
        """Let go of the bucket too."""
        super().let_go()
        self._collectives = self._on = self._before = self._behind = None


class BucketWork(Job):
    """What is done to a bucket besides communicating, after the jobs ``after``."""

    tells_itself = True

    def __init__(self, name: str, bucket: LiveBucket, work: Callable[[], None], after: Sequence[Job]) -> None:
        super().__init__(name, bucket.index, bucket.size_bytes, lambda _channel: work(), after)
        self._fence = bucket.fence.acquire_on_host()

    @contextmanager
    def around(self) -> Iterator[None]:
        """The use of the buffer."""
        with self._fence, own_work():
            yield


class BucketTransport:
    """The channels of one engine, and the jobs that they carry.

    ``submit`` queues a job behind what is queued, and returns it: every rank must do so at the same point.
    """

    def __init__(
        self,
        wiring: Wiring,
        groups: OwnGroups,
        hosts: Hosts,
        culprit: Culprit,
        condition: Condition,
        disagreement: Disagreement,
    ) -> None:
        self.streams = wiring.streams
        self.rank, self.world_size = dist.get_rank(groups.host[0]), dist.get_world_size(groups.host[0])
        self.channels = len(groups.native or groups.host)  # how many collectives may be in flight at a time
        self.steps = 0  # how many optimizers' steps this rank has taken under the schedule in force
        self.counts_steps = True  # not where ranks may take different numbers of them
        self.used = 0  # and how many are, by the schedule in force
        self._wiring = wiring
        self._groups = groups
        self.hosts = hosts
        self._condition = condition
        self._channels: Channels | StreamChannels
        if wiring.native:
            host = Channels(groups, culprit, Streams(torch.device("cpu")), DecoupledStrategy.name)
            self._channels = StreamChannels(groups.native, host, wiring.streams)
        else:
            self._channels = Channels(groups, culprit, wiring.streams, DecoupledStrategy.name, disagreement)
        self.submit: Callable[[Job], Job] = self._channels.submit
        self._collectives: Collectives

    def use(self, buckets: Sequence[LiveBucket], schedule: BucketSchedule) -> None:
        """Carry ``buckets`` from now on; every rank says so at the same point, with nothing queued."""
        self._channels.use(schedule.channels)
        self.steps, self.counts_steps = 0, True
        self.used = schedule.channels
        self._collectives = (
            BackendCollectives(self._groups.native)
            if self._wiring.native
            else ChunkProgramCollectives(buckets, self.prepare, schedule, self.world_size, self.hosts)
        )

    def reduction(self, bucket: LiveBucket, behind: Callable[[], None] | None = None) -> Job:
        """The reduce-scatter of ``bucket`` by its number; ``behind`` is done on its thread or stream."""
        return BucketJob(REDUCE_SCATTER, bucket, self._collectives, None, (), behind, self.steps)

    def gathering(
        self,
        bucket: LiveBucket,
        before: Callable[[], None] | None = None,
        after: Sequence[Job] = (),
        behind: Callable[[], None] | None = None,
    ) -> Job:
        """The next all-gather of ``bucket``, which begins after the jobs ``after``.

        ``before`` is done by then: on a device in the gather's stream, otherwise while earlier collectives have the
        channels.
        """
        bucket.gathers += 1
        if before is not None and isinstance(self._channels, Channels):
            work = BucketWork("update", bucket, before, after)
            before, after = None, [self._channels.submit_work(work)]
        return BucketJob(ALL_GATHER, bucket, self._collectives, before, after, behind, self.steps)

    def all_reduce(self, tensor: torch.Tensor) -> Job:
        """A job that sums a small tensor over ranks, in place."""
        numel = tensor.numel()
        scratch = tensor.new_empty(scratch_numel(numel, self.world_size))

        def work(channel: int) -> None:
            self.prepare(Selection(RING, ALL_REDUCE), tensor, scratch, channel)()

        return Job("all_reduce", -1, numel * tensor.element_size(), work)

    def prepare(self, selection: Selection, flat: torch.Tensor, scratch: torch.Tensor, channel: int) -> Run:
        """A collective of a tensor on the CPU, to be run on ``channel``."""
        groups = self._groups
        second = groups.second[channel] if groups.second else None
        return prepare(selection, flat, groups.host[channel], scratch, second)

    def exchange(self, outgoing: torch.Tensor, incoming: torch.Tensor, stride: int, channel: int) -> float:
        """Send to the rank ``stride`` behind this one, on ``channel``, and receive what the one before it sends.

        Returns after how many seconds that has come. Tensors are on the CPU.
        """
        group, begun = self._groups.host[channel], time.perf_counter()
        # First: Gloo announces a receive on the connection that what this rank sends may go by.
        receiving = group.recv([incoming], (self.rank - stride) % self.world_size, EXCHANGED)
        sending = group.send([outgoing], (self.rank + stride) % self.world_size, EXCHANGED)
        receiving.wait()
        took_s = time.perf_counter() - begun
        sending.wait()
        return took_s

    def wait(self, job: Job) -> None:
        """Return when ``job`` is done. Raises CommunicationError or InternalError where it failed, and ever after."""
        try:
            self._channels.wait(job)
        except CommunicationError as error:
            self._condition.failure = CommunicationError(f"{error} {TO_SAVE}")
            raise self._condition.failure from error.__cause__
        except HeadwayError as error:
            self._condition.failure = error
            raise

    def meet(self) -> None:
        """Wait for every rank to come to this point."""
        token = torch.zeros(self.world_size, dtype=torch.int32, device="cpu")
        self.wait(self.submit(self.all_reduce(token)))

    def note_step(self) -> None:
        """An optimizer steps by reduced gradients."""
        self.steps += self.counts_steps

    def asked_for(self, sequence: int) -> list[Any] | None:
        """What the collective of that number is; None where it has not been submitted, or was long ago."""
        job = self._channels.job(sequence) if isinstance(self._channels, Channels) else None
        return None if job is None else job.identity

    @property
    def progress(self) -> tuple[int, str]:
        """How many collectives this rank has asked for, and the last of them."""
        last = self._channels.last
        return self._channels.submitted, "" if last is None else str(last)

    def finish_queued(self, deadline_s: float) -> None:
        """Return when all that was submitted is done, or at ``deadline_s``."""
        if isinstance(self._channels, Channels):
            self._channels.finish_queued(deadline_s)

    def abort(self) -> None:
        """Close the connections, so that peers fail rather than wait."""
        for group in self._groups.all:
            torch_private.abort_group(group)

    def stop(self) -> None:
        """End the channels after what is queued."""
        self._channels.stop()

    def disconnect(self) -> None:
        """Let go of what is bound to connections, once stopped."""
        del self._channels, self._collectives, self.submit
