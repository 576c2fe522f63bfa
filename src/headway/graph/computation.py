"""Describes what ranks compute, without communication: timelines of recorded ranks, and factors for changes.

A timeline is one rank's step without any wait for communication: stretches of computation, and between them the points
at which a strategy acts. It stays the same under another communication plan, so replay lays a strategy over it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import cycle, groupby, islice
from typing import NamedTuple

from headway.errors import UserError


class Part:
    """The kinds of stretches of computation."""

    INPUT = "input"
    FORWARD = "forward"
    BACKWARD = "backward"
    FINALIZE = "finalize"  # after the wait for gradients: DDP copies buckets back
    READ = "read"  # gradients are clipped, unscaled or read, or parameters are read; ``name`` says which
    OPTIMIZER = "optimizer"
    REST = "rest"


class Point:
    """The kinds of points at which a strategy acts."""

    USE = "use"  # forward is about to need the parameters of the module ``name``
    READY = "ready"  # the gradient of the parameter ``name`` is complete on this rank
    UNUSED = "unused"  # a backward begins that leaves the parameter ``name`` without a gradient on this rank
    BACKWARD_END = "backward_end"  # the computation of a backward that synchronises is done
    BLOCKING = "blocking"  # a collective that the main thread waits for, not of gradients
    STEP = "step"  # the optimizer is about to step
    MESSAGE = "message"  # a pipeline's message is about to be sent, or its receive posted
    ARRIVED = "arrived"  # the rank has waited for such a message


class MessageEnd(NamedTuple):
    """One end of a message: the peer, and the message's sequence number in the group to or from that peer."""

    sends: bool
    peer: int
    group: str
    sequence: int


class Item(NamedTuple):
    """A stretch of computation (``duration_ns`` of part ``kind``) or a point (of no duration).

    A read takes the time that one rank needs for everything that it reads, possibly none. Without a pipeline ``stage``
    is 0 and ``micro_batch`` is -1, the whole batch.
    """

    kind: str
    name: str = ""
    duration_ns: int = 0
    size_bytes: int = 0
    parameters: tuple[str, ...] = ()  # of a read: those that are read; all where there are none
    overlap: float = 0.0  # the share of the stretch during which a collective was in flight on this rank
    stage: int = 0
    micro_batch: int = -1
    message: MessageEnd | None = None  # of the points of messages
    members: tuple[int, ...] = ()  # of a blocking collective: who takes part, where that is not every rank


@dataclass(frozen=True, slots=True)
class Timeline:
    """One rank's step without its waits, in order.

    ``background_ns`` is the total optimizer work of all ranks that share it off their main threads, without the
    overhead per bucket; None if the optimizer runs on the main threads.
    """

    rank: int
    step: int
    items: tuple[Item, ...]
    background_ns: int | None = None

    @property
    def optimizer_ns(self) -> int:
        """The time that an update of all parameters takes one rank.

        If ranks share it off their main threads, those only start it and take over the results.
        """
        if self.background_ns is not None:
            return self.background_ns
        return sum(item.duration_ns for item in self.items if item.kind == Part.OPTIMIZER)

    def scaled(self, compute: float) -> Timeline:
        """The same step with computation times multiplied by ``compute``; input waits stay."""
        items = tuple(
            item if item.kind == Part.INPUT else item._replace(duration_ns=round(item.duration_ns * compute))
            for item in self.items
        )
        background_ns = None if self.background_ns is None else round(self.background_ns * compute)
        return Timeline(self.rank, self.step, items, background_ns)

    def undisturbed(self, slowdown: float) -> Timeline:
        """The same step without the slowdown by communication in flight, a relative ``slowdown`` while it overlaps."""
        items = tuple(
            item._replace(duration_ns=round(item.duration_ns / (1 + slowdown * item.overlap)))
            if item.overlap
            else item
            for item in self.items
        )
        return Timeline(self.rank, self.step, items, self.background_ns)


RankTimelines = Mapping[int, tuple[Timeline, ...]]


@dataclass(frozen=True, eq=False)
class Computation:
    """The steps that ranks compute, without communication.

    ``timelines[rank][position]`` are the steps of recorded ranks; further ranks repeat them. ``factor`` multiplies all
    computation times, ``rank_factors`` additionally those of single ranks. The first step is played ``warm_up_steps``
    times before the steps that count, so that work carried over between steps is in flight. ``with_factors`` rebuilds
    the timelines with factors for names that match patterns; None if names are unknown.
    """

    timelines: RankTimelines
    warm_up_steps: int = 1
    factor: float = 1.0
    rank_factors: Mapping[int, float] = field(default_factory=dict)
    with_factors: Callable[[Mapping[str, float]], RankTimelines] | None = None

    def scaled(self, factor: float, rank_factors: Mapping[int, float]) -> Computation:
        """The same with computation times multiplied by ``factor``, and by ``rank_factors`` on single ranks."""
        ranks = {
            rank: self.rank_factors.get(rank, 1.0) * rank_factors.get(rank, 1.0)
            for rank in {*self.rank_factors, *rank_factors}
        }
        return replace(self, factor=self.factor * factor, rank_factors=ranks)

    def kernels_scaled(self, factors: Mapping[str, float]) -> Computation:
        """The same with the times of names that match the patterns multiplied by ``factors``.

        Raises UserError if names are unknown, TraceError for a pattern that matches nothing.
        """
        if self.with_factors is None:
            raise UserError(
                "scaling single kernels needs a recording", got=", ".join(factors),
                expected="a recording", fix="Record with headway record --detail operators.",
            )  # fmt: skip
        again = self.with_factors

        def with_both(more: Mapping[str, float]) -> RankTimelines:
            return again({**factors, **more})

        return replace(self, timelines=again(factors), with_factors=with_both)

    def in_periods_of(self, steps: int) -> Computation:
        """The same for strategies with a period of ``steps``: repeats steps to fill whole periods, warm-up included."""
        if steps == 1:
            return self
        longest = max(map(len, self.timelines.values()))
        count = -(-longest // steps) * steps
        ranks = {rank: tuple(islice(cycle(timeline), count)) for rank, timeline in self.timelines.items()}
        return replace(self, timelines=ranks, warm_up_steps=-(-self.warm_up_steps // steps) * steps)

    @cached_property
    def has_groups(self) -> bool:
        """Whether any blocking collective has only some ranks."""
        return any(
            item.members for timeline in self.timelines.values() for step in timeline for item in step.items
        )

    def factor_of(self, rank: int) -> float:
        """The factor on the computation times of ``rank``."""
        return self.factor * self.rank_factors.get(rank, 1.0)


COMPUTED = frozenset(value for name, value in vars(Part).items() if name.isupper())


@dataclass(frozen=True, slots=True)
class ComputeBlock:
    """Computation of one kind (``Part``) for one micro-batch in one stage.

    ``items`` are its stretches and points in order; ``micro_batch`` is -1 for the whole batch.
    """

    stage: int
    kind: str
    micro_batch: int
    items: tuple[Item, ...]

    @property
    def duration_ns(self) -> int:
        """Its time without waits."""
        return sum(item.duration_ns for item in self.items)

    def scaled(self, factor: float) -> ComputeBlock:
        """The same with times multiplied by ``factor``, as for a micro-batch of another size."""
        items = tuple(item._replace(duration_ns=round(item.duration_ns * factor)) for item in self.items)
        return ComputeBlock(self.stage, self.kind, self.micro_batch, items)

    def of_micro_batch(self, micro_batch: int) -> ComputeBlock:
        """The same for another micro-batch."""
        items = tuple(item._replace(micro_batch=micro_batch) for item in self.items)
        return ComputeBlock(self.stage, self.kind, micro_batch, items)


def blocks_of(timeline: Timeline) -> tuple[ComputeBlock, ...]:
    """The blocks of a step in order; together they contain all its items.

    A point belongs to the block before it (a gradient is ready once computed), except a use, which starts the next one.
    """
    return tuple(
        ComputeBlock(stage, kind, micro_batch, tuple(item for _, item in keyed_items))
        for (stage, kind, micro_batch), keyed_items in groupby(_with_keys(timeline), key=lambda pair: pair[0])
    )


def timeline_of(blocks: tuple[ComputeBlock, ...], like: Timeline) -> Timeline:
    """A step of the same rank as ``like`` that computes ``blocks`` in order."""
    items = tuple(item for block in blocks for item in block.items)
    return Timeline(like.rank, like.step, items, like.background_ns)


def _with_keys(timeline: Timeline) -> Iterator[tuple[tuple[int, str, int], Item]]:
    """Each item with the stage, kind and micro-batch of its block."""
    items = timeline.items
    following = [""] * len(items)
    kind = ""
    for index in range(len(items) - 1, -1, -1):
        kind = items[index].kind if items[index].kind in COMPUTED else kind
        following[index] = kind
    before = ""
    for index, item in enumerate(items):
        if item.kind in COMPUTED:
            before = item.kind
        of = following[index] if item.kind == Point.USE or not before else before
        yield (item.stage, of or before, item.micro_batch), item
