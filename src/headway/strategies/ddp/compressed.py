"""Compressed buckets, live: a communication hook of DDP whose channels encode, exchange and decode.

A bucket is one job of a channel: the thread that trains only queues it. So what it takes to encode is concurrent with
backward, several exchanges of a bucket follow each other in the same order on all ranks, and no thread of the process
group waits for another one's collective.

What was not sent of a parameter's gradients is kept by parameter for the next step (error feedback, Karimireddy et al.,
2019). A bucket works on a flat tensor of its own, as gradients lie in it, and the parameters' parts are views of that;
where DDP has cut its buckets anew, the parts move to new flat tensors.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from headway.collectives import live
from headway.collectives.algorithms import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COMPRESSED
from headway.compression.codec import MOST_EXCHANGES, Codec, Gradients, Reduced, Sent, Shape, computed_in
from headway.plugins import PluginFaultError, asking, is_own
from headway.scheduling.ddp_buckets import COMPRESSED_CHANNELS
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.live.channels.communication import Job, own_work
from headway.strategies.live.channels.hooked import HookedChannels
from headway.strategies.live.channels.observer import Collective, observer

KINDS = (ALL_REDUCE, ALL_GATHER, ALL_TO_ALL)

Exchanging = Callable[[Sent], torch.Tensor]
"""Carries out one collective; raises where a peer fails."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A bucket on its way: its gradients, flat, and what is ``kept`` of earlier ones, None without error feedback.

    ``shapes`` and ``keys`` are those of its parameters. With ``some_unused``, those whose gradients are all zeros may
    have none: DDP drops what it gets for a parameter that no rank has used.
    """

    buffer: torch.Tensor
    kept: torch.Tensor | None
    shapes: Sequence[Shape]
    keys: Sequence[int]
    some_unused: bool = False


def send(
    codec: Codec,
    bucket: Outgoing,
    exchange: Exchanging,
    memory: dict[int, torch.Tensor],
    rank: int,
    world_size: int,
) -> bool:
    """Put the mean over ranks, as far as ``codec`` sends it, in the place of the bucket's gradients.

    Returns whether it is finite. Where it is not, as in a step that a GradScaler skips, what is kept and remembered is
    worth nothing. Raises PluginFaultError where another package's codec fails, or gives what is no mean of these.
    """
    buffer, kept = bucket.buffer, bucket.kept
    with own_work():
        full = buffer.to(computed_type(buffer)) if kept is None else kept.add_(buffer)
        held = _held_back(bucket, full) if kept is not None and bucket.some_unused else None
        flat = full if held is None else full - held
        with asking("codec", codec):
            reduction = codec.reduce(Gradients(flat, bucket.shapes, bucket.keys, rank, world_size, memory))
            sent = next(reduction)
    while True:
        _check_sent(codec, sent)
        result = exchange(sent)
        with own_work(), asking("codec", codec):
            try:
                sent = reduction.send(result)
            except StopIteration as stop:
                _check_reduced(codec, stop.value, buffer, feeds_back=kept is not None)
                return _taken_over(bucket, stop.value, held)


def computed_type(gradients: torch.Tensor) -> torch.dtype:
    """The type in which codecs compute on these."""
    found: torch.dtype = getattr(torch, computed_in(str(gradients.dtype).removeprefix("torch.")))
    return found


def _held_back(bucket: Outgoing, full: torch.Tensor) -> torch.Tensor | None:
    """What is kept of parameters without a gradient, which waits for the next one."""
    numels = [torch.Size(shape).numel() for shape in bucket.shapes]
    unused = [not bool(part.any()) for part in bucket.buffer.split(numels)]
    if not any(unused):
        return None
    held = torch.zeros_like(full)
    for own, part, without in zip(held.split(numels), full.split(numels), unused, strict=True):
        if without:
            own.copy_(part)
    return held


def _check_sent(codec: Codec, sent: object) -> None:
    if not isinstance(sent, Sent):
        raise PluginFaultError("codec", codec, f"reduce() yielded {type(sent).__name__}, expected Sent")
    if sent.kind not in KINDS:
        expected = " or ".join(KINDS)
        raise PluginFaultError("codec", codec, f"reduce() sent {sent.kind!r}, expected {expected}")


def _check_reduced(codec: Codec, reduced: object, gradients: torch.Tensor, *, feeds_back: bool) -> None:
    """Raise PluginFaultError where ``reduced`` cannot take the place of the flat ``gradients``."""
    if not isinstance(reduced, Reduced):
        raise PluginFaultError(
            "codec", codec, f"reduce() returned {type(reduced).__name__}, expected Reduced"
        )
    given = {"the mean": reduced.mean, "what is kept": reduced.kept}
    for what, tensor in list(given.items())[: 2 if feeds_back else 1]:
        if not isinstance(tensor, torch.Tensor) or tensor.shape != gradients.shape:
            shape: tuple[int, ...] = tuple(getattr(tensor, "shape", ()))
            got = f"{shape[0]} elements" if len(shape) == 1 else f"the shape {shape}"
            raise PluginFaultError("codec", codec, f"{what} has {got}, expected {gradients.numel()}")


def _taken_over(bucket: Outgoing, reduced: Reduced, held: torch.Tensor | None) -> bool:
    bucket.buffer.copy_(reduced.mean)
    if bucket.kept is not None:
        bucket.kept.copy_(reduced.kept)
        if held is not None:
            bucket.kept.add_(held)
    return bool(reduced.mean.sum().isfinite())


class Feedback:
    """What this rank keeps, by the keys of parameters, and what codecs remember of them (``memory``)."""

    def __init__(self) -> None:
        self.memory: dict[int, torch.Tensor] = {}
        self._parts: dict[int, torch.Tensor] = {}
        self._flats: dict[tuple[int, ...], torch.Tensor] = {}

    def of(self, keys: Sequence[int], numels: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """What is kept of a bucket's parameters, behind each other, to be changed in place; zeros at first."""
        together = tuple(keys)
        flat = self._flats.get(together)
        if flat is not None and flat.dtype == dtype and flat.numel() == sum(numels):
            return flat
        flat = torch.zeros(sum(numels), dtype=dtype)
        for known in [known for known in self._flats if set(known) & set(together)]:
            del self._flats[known]  # parts that stay behind are views that keep it
        for key, part in zip(keys, flat.split(list(numels)), strict=True):
            if key in self._parts:
                part.copy_(self._parts[key])
            self._parts[key] = part
        self._flats[together] = flat
        return flat

    def forget(self, keys: Sequence[int]) -> None:
        """Begin anew with these parameters."""
        for key in keys:
            self.memory.pop(key, None)
            if key in self._parts:
                self._parts[key].zero_()

    def forget_all(self) -> None:
        """Begin anew with all parameters."""
        self.forget([*{*self.memory, *self._parts}])

    def kept(self) -> dict[int, torch.Tensor]:
        """A copy of what is kept, flat, by key."""
        return {key: part.clone() for key, part in self._parts.items()}

    def restore(self, kept: Mapping[int, torch.Tensor], memory: Mapping[int, torch.Tensor]) -> None:
        """Go on from what ``kept`` and ``memory`` were elsewhere."""
        self._flats.clear()
        self._parts = {key: part.clone() for key, part in kept.items()}
        self.memory = {key: own.clone() for key, own in memory.items()}


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
        digests = live.gathered(torch.tensor([digest]), self._groups.host[channel]).view(-1).tolist()
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


EXCHANGES = {ALL_REDUCE: live.summed, ALL_GATHER: live.gathered, ALL_TO_ALL: live.exchanged}


def send_bucket(compressing: Compressing, bucket: Any) -> torch.futures.Future[Any]:
    """DDP's communication hook."""
    return compressing.reduce(bucket)


send_bucket.__annotations__.clear()  # DDP compares them with types, and here they are names
