"""What the ranks of a job compute: timelines of the ranks that are known, and by how much others differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import cycle, groupby, islice
from typing import NamedTuple

from headway.errors import UserError

# Timelines: what one rank's main thread does in a step once every wait for communication is taken out.
#
# A timeline is what stays when the communication plan changes: stretches of computation, and between them the
# points at which a strategy acts. Replay lays a strategy over it again.


class Part:
    """What a stretch of computation is part of."""

    INPUT = "input"
    FORWARD = "forward"
    BACKWARD = "backward"
    FINALIZE = "finalize"  # after the wait for gradients: DDP copies buckets back
    READ = "read"  # gradients are clipped, unscaled or read, or parameters are read; ``name`` says which
    OPTIMIZER = "optimizer"
    REST = "rest"


class Point:
    """Where a strategy acts."""

    USE = "use"  # forward is about to need the parameters of the module ``name``
    READY = "ready"  # the gradient of the parameter ``name`` is complete on this rank
    UNUSED = "unused"  # a backward begins that leaves the parameter ``name`` without a gradient on this rank
    BACKWARD_END = "backward_end"  # the computation of a backward that synchronises is done
    BLOCKING = "blocking"  # a collective that the main thread waits for, not of gradients
    STEP = "step"  # the optimizer is about to step
    MESSAGE = "message"  # a message of a pipeline is about to be sent, or its receive posted
    ARRIVED = "arrived"  # the rank has waited for the end of such a message


class MessageEnd(NamedTuple):
    """One end of a message: who is at the other one, and which it is of those of its group to that rank."""

    sends: bool
    peer: int
    group: str
    sequence: int


class Item(NamedTuple):
    """A stretch of computation (``duration_ns`` of part ``kind``) or a point (of no duration).

    A read lasts as long as one rank needs for all that it reads, and may last no time. ``stage`` and ``micro_batch``
    say of what it is computed: of the only stage, and of the whole batch (-1), where the job has no pipeline.
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

    ``background_ns`` is the optimizer's work that ranks shared and did off their main threads, over all of them,
    without what every bucket's update costs by itself; None where they did it on their main threads.
    """

    rank: int
    step: int
    items: tuple[Item, ...]
    background_ns: int | None = None

    @property
    def optimizer_ns(self) -> int:
        """What the optimizer's whole update of all parameters takes one rank.

        Where ranks shared it off their main threads, these only asked for it and took over its results.
        """
        if self.background_ns is not None:
            return self.background_ns
        return sum(item.duration_ns for item in self.items if item.kind == Part.OPTIMIZER)

    def scaled(self, compute: float) -> Timeline:
        """The same step with computation taking ``compute`` times as long; input waits stay."""
        items = tuple(
            item if item.kind == Part.INPUT else item._replace(duration_ns=round(item.duration_ns * compute))
            for item in self.items
        )
        background_ns = None if self.background_ns is None else round(self.background_ns * compute)
        return Timeline(self.rank, self.step, items, background_ns)

    def undisturbed(self, slowdown: float) -> Timeline:
        """The same step as if no communication had slowed its computation down, by ``slowdown`` while in flight."""
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
    """The steps that ranks compute, without any communication.

    ``timelines[rank][position]`` are the steps of the ranks that are known; the others do what these do. ``factor``
    multiplies the time that computation takes, ``rank_factors`` that of single ranks besides. The first step is played
    ``warm_up_steps`` times before those that count, so that what a strategy carries over from step to step is in
    flight. ``with_factors`` gives the timelines again where what has a name that a pattern matches takes so many times
    as long; it is None where names are not known.
    """

    timelines: RankTimelines
    warm_up_steps: int = 1
    factor: float = 1.0
    rank_factors: Mapping[int, float] = field(default_factory=dict)
    with_factors: Callable[[Mapping[str, float]], RankTimelines] | None = None

    def scaled(self, factor: float, rank_factors: Mapping[int, float]) -> Computation:
        """The same with computation taking ``factor`` times as long, on single ranks ``rank_factors`` times that."""
        ranks = {
            rank: self.rank_factors.get(rank, 1.0) * rank_factors.get(rank, 1.0)
            for rank in {*self.rank_factors, *rank_factors}
        }
        return replace(self, factor=self.factor * factor, rank_factors=ranks)

    def kernels_scaled(self, factors: Mapping[str, float]) -> Computation:
        """The same with what a pattern of ``factors`` matches by name taking so many times as long.

        Raises UserError where nothing has names, TraceError for a pattern that nothing matches.
        """
        if self.with_factors is None:
            raise UserError(
                "times of single kernels are known only from a recording", got=", ".join(factors),
                expected="a recording", fix="Record with headway record --detail operators.",
            )  # fmt: skip
        again = self.with_factors

        def with_both(more: Mapping[str, float]) -> RankTimelines:
            return again({**factors, **more})

        return replace(self, timelines=again(factors), with_factors=with_both)

    def in_periods_of(self, steps: int) -> Computation:
        """The same where ranks do something else in each of so many steps: steps repeat until there are whole periods.

        Whole periods are played before those that count, too.
        """
        if steps == 1:
            return self
        longest = max(map(len, self.timelines.values()))
        count = -(-longest // steps) * steps
        ranks = {rank: tuple(islice(cycle(timeline), count)) for rank, timeline in self.timelines.items()}
        return replace(self, timelines=ranks, warm_up_steps=-(-self.warm_up_steps // steps) * steps)

    @cached_property
    def has_groups(self) -> bool:
        """Whether ranks wait for collectives of some ranks only."""
        return any(
            item.members for timeline in self.timelines.values() for step in timeline for item in step.items
        )

    def factor_of(self, rank: int) -> float:
        """How many times as long computation takes on ``rank`` as its timelines say."""
        return self.factor * self.rank_factors.get(rank, 1.0)


COMPUTED = frozenset(value for name, value in vars(Part).items() if name.isupper())


@dataclass(frozen=True, slots=True)
class ComputeBlock:
    """Computation of one kind (``Part``) of one micro-batch through one stage.

    ``items`` are the stretches and points that it is made of, in their order; ``micro_batch`` is -1 for the whole
    batch.
    """

    stage: int
    kind: str
    micro_batch: int
    items: tuple[Item, ...]

    @property
    def duration_ns(self) -> int:
        """What it takes by itself."""
        return sum(item.duration_ns for item in self.items)

    def scaled(self, factor: float) -> ComputeBlock:
        """The same computation in ``factor`` times the time, as of a micro-batch of another size."""
        items = tuple(item._replace(duration_ns=round(item.duration_ns * factor)) for item in self.items)
        return ComputeBlock(self.stage, self.kind, self.micro_batch, items)

    def of_micro_batch(self, micro_batch: int) -> ComputeBlock:
        """The same computation of another micro-batch."""
        items = tuple(item._replace(micro_batch=micro_batch) for item in self.items)
        return ComputeBlock(self.stage, self.kind, micro_batch, items)


def blocks_of(timeline: Timeline) -> tuple[ComputeBlock, ...]:
    """The blocks of a step, in its order: joined they are its items.

    A point belongs to the block that it ends (a gradient is ready when it has been computed), but for a use, which
    begins what comes after it.
    """
    return tuple(
        ComputeBlock(stage, kind, micro_batch, tuple(item for _, item in keyed_items))
        for (stage, kind, micro_batch), keyed_items in groupby(_with_keys(timeline), key=lambda pair: pair[0])
    )


def timeline_of(blocks: tuple[ComputeBlock, ...], like: Timeline) -> Timeline:
    """The step of the same rank that computes ``blocks``, in their order."""
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
