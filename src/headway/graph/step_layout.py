"""Lays the steps of all ranks out in a graph, and summarises them as a ``StepProfile`` for planners.

A strategy that keeps the recorded order of computation reacts to its points (``InRecordedOrder``). One that reorders,
splits, repeats or drops computation lays blocks out itself (``StepLayout``; ``computation.blocks_of``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headway.collectives.algorithms import ALL_REDUCE, KINDS
from headway.graph.build import GraphBuilder, RankCursor, S
from headway.graph.computation import Item, Part, Point, Timeline
from headway.scheduling.buckets import BucketSchedule
from headway.trace.events import Event, Events, Kind, Stream

FEW_SIZES = 3
OVERHEAD_GUESS_NS = 100_000.0


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """The cost of deferred updates (ns): per bucket, and for all parameters on one rank."""

    overhead_ns: float = 0.0
    whole_ns: float = 0.0


def update_cost(
    updates: Mapping[int, Sequence[int]], sizes_bytes: Mapping[int, int], ranks: int
) -> UpdateCost:
    """Fit the cost of updates, each shared by ``ranks``, to their times ``updates[bucket]``: linear in bucket size."""
    buckets = [bucket for bucket in updates if bucket in sizes_bytes and updates[bucket]]
    if not buckets:
        return UpdateCost()
    times_ns = np.array([max(1.0, float(np.median(updates[bucket]))) for bucket in buckets])
    sizes = np.array([float(sizes_bytes[bucket]) for bucket in buckets])
    overhead_ns = min(OVERHEAD_GUESS_NS, float(times_ns.min()) / 2)
    if len(set(sizes.tolist())) >= FEW_SIZES:
        line = np.stack([1.0 / times_ns, sizes / times_ns], axis=1)
        fitted, *_ = np.linalg.lstsq(line, np.ones_like(times_ns), rcond=None)
        overhead_ns = float(np.clip(fitted[0], 0.0, times_ns.min()))
    return UpdateCost(overhead_ns, ranks * float((times_ns - overhead_ns).sum()))


def is_background(row: Event) -> bool:
    """Whether ``row`` is an update that ran on a communication thread."""
    return row.kind == Kind.UPDATE and row.stream != Stream.COMPUTE


def background_update_cost(events: Events, ranks: int) -> UpdateCost:
    """The cost of one rank's recorded updates off its main thread, each shared by ``ranks``."""
    updates: dict[int, list[int]] = defaultdict(list)
    sizes_bytes: dict[int, int] = {}
    for row in events.of_kind(Kind.UPDATE, Kind.COLLECTIVE):
        if is_background(row):
            updates[row.bucket].append(row.duration_ns)
        elif row.kind == Kind.COLLECTIVE and row.bucket >= 0:
            sizes_bytes[row.bucket] = row.size_bytes
    return update_cost(updates, sizes_bytes, ranks)


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One step of computation on the rank that has the most of it. All times are nanoseconds.

    ``needs_ns[module]`` is when forward first needs its parameters, after forward's start; ``ready_ns[parameter]`` is
    when its gradient is complete, after backward's start. ``between_ns`` lies between forward and backward, ``tail_ns``
    between backward and the optimizer's step, ``rest_ns`` from there to the next forward. ``optimizer_ns`` is one update
    of all parameters by one rank; the other times exclude it. Reads of gradients are excluded: they depend on the
    strategy.
    """

    forward_ns: int
    backward_ns: int
    needs_ns: Mapping[str, int]
    ready_ns: Mapping[str, int]
    between_ns: int = 0
    tail_ns: int = 0
    rest_ns: int = 0
    optimizer_ns: int = 0

    @property
    def computation_ns(self) -> int:
        """The step without the optimizer's update."""
        return self.forward_ns + self.between_ns + self.backward_ns + self.tail_ns + self.rest_ns

    def timeline(self, rank: int = 0, step: int = 0) -> Timeline:
        """A step with this profile, without reads by the script."""
        uses = sorted(self.needs_ns.items(), key=lambda pair: pair[1])
        readies = sorted(self.ready_ns.items(), key=lambda pair: pair[1])
        items = [
            *_along(Part.FORWARD, Point.USE, uses, self.forward_ns),
            Item(Part.REST, "", self.between_ns),
            *_along(Part.BACKWARD, Point.READY, readies, self.backward_ns),
            Item(Point.BACKWARD_END),
            Item(Part.REST, "", self.tail_ns),
            Item(Point.STEP),
            Item(Part.OPTIMIZER, "", self.optimizer_ns),
            Item(Part.REST, "", self.rest_ns),
        ]
        return Timeline(rank, step, tuple(items))


def _along(part: str, point: str, moments: Sequence[tuple[str, int]], length_ns: int) -> list[Item]:
    """``length_ns`` of a pass, with points at their moments."""
    items = []
    before = 0
    for name, moment in moments:
        items += [Item(part, "", moment - before), Item(point, name)]
        before = moment
    return [*items, Item(part, "", length_ns - before)]


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """The forward and backward times of one module, and its own parameters.

    ``kept_bytes`` are its activations (0 if unknown). ``cut_bytes`` is the size of its output if the model may be split
    after it, else 0.
    """

    module: str
    parameters: tuple[str, ...]
    forward_ns: int
    backward_ns: int
    kept_bytes: int = 0
    cut_bytes: int = 0


def profile_of(timelines: Mapping[int, Sequence[Timeline]]) -> StepProfile:
    """The mean step of the slowest of the recorded ranks (``timelines[rank][position]``).

    With several passes per step, forward starts at the first use of a module and backward is the last one that makes
    gradients ready; everything between counts to ``between_ns``. Steps without ready gradients are skipped if possible.
    """
    means = [_mean([_step_profile(timeline) for timeline in steps]) for steps in timelines.values()]
    return max(means, key=lambda profile: profile.computation_ns + profile.optimizer_ns)


def _step_profile(timeline: Timeline) -> StepProfile:
    """One step's profile. Time is that of its computation, without waits and without the optimizer's update."""
    forward_at = forward_end = backward_at = backward_end = step_at = None
    uses: dict[str, int] = {}
    ready: dict[str, int] = {}
    before = ""  # the last pass that computed
    now = 0
    for item in timeline.items:
        match item.kind:
            case Point.USE:
                forward_at = now if forward_at is None else forward_at
                uses.setdefault(item.name, now)
            case Part.FORWARD:
                forward_at = now if forward_at is None else forward_at
                forward_end = now + item.duration_ns if backward_at is None else forward_end
            case Part.BACKWARD if before != Part.BACKWARD:
                backward_at = now
            case Point.READY:
                ready[item.name] = now
            case Point.BACKWARD_END:
                backward_end = now
            case Point.STEP:
                step_at = now if step_at is None else step_at
        if item.kind in (Part.FORWARD, Part.BACKWARD) and item.duration_ns:
            before = item.kind
        if item.kind not in (Part.READ, Part.OPTIMIZER, Part.FINALIZE):
            now += item.duration_ns
    begin, end_forward, at, end, step = _ordered(forward_at, forward_end, backward_at, backward_end, step_at)
    return StepProfile(
        forward_ns=end_forward - begin,
        between_ns=at - end_forward,
        backward_ns=end - at,
        tail_ns=step - end,
        rest_ns=now - step + begin,
        needs_ns={name: moment - begin for name, moment in uses.items()},
        ready_ns={name: max(0, moment - at) for name, moment in ready.items()},
        optimizer_ns=timeline.optimizer_ns,
    )


def _ordered(*moments: int | None) -> list[int]:
    """The moments made monotonic; unknown ones take the value of the previous one."""
    ordered = [0]
    for moment in moments:
        ordered.append(ordered[-1] if moment is None else max(ordered[-1], moment))
    return ordered[1:]


def _mean(profiles: Sequence[StepProfile]) -> StepProfile:
    profiles = [profile for profile in profiles if profile.ready_ns] or profiles
    lengths = {
        name: round(float(np.mean([getattr(profile, name) for profile in profiles])))
        for name in ("forward_ns", "backward_ns", "between_ns", "tail_ns", "rest_ns", "optimizer_ns")
    }
    return StepProfile(
        needs_ns=_mean_of(profile.needs_ns for profile in profiles),
        ready_ns=_mean_of(profile.ready_ns for profile in profiles),
        **lengths,
    )


def _mean_of(offsets: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The mean offset of every name over the steps that have it, sorted by time."""
    offsets_of: dict[str, list[int]] = {}
    for step_offsets in offsets:
        for name, offset in step_offsets.items():
            offsets_of.setdefault(name, []).append(offset)
    means = {name: round(float(np.mean(values))) for name, values in offsets_of.items()}
    return dict(sorted(means.items(), key=lambda pair: pair[1]))


BLOCKING_A_STEP = 1_000_000  # more than any step has


class StepLayout(Protocol):
    """Lays out the steps of ranks as a strategy runs them."""

    def lay_out_step(self, cursor: RankCursor, timeline: Timeline) -> None:
        """Add one step of one rank to the graph: its computation, launches and waits."""


class InRecordedOrder(ABC):
    """Lays out computation in recorded order; subclasses react to the points of every rank's timeline."""

    def __init__(self, graph: GraphBuilder[BucketSchedule]) -> None:
        self._graph = graph

    def use(self, cursor: RankCursor, module: str) -> None:  # noqa: B027 - most strategies always hold whole parameters
        """Forward is about to need the parameters of ``module``; by default they are present."""

    def use_all(self, cursor: RankCursor) -> None:  # noqa: B027 - as above
        """Forward begins and it is unknown when it needs which parameters; by default all are present."""

    @abstractmethod
    def ready(self, cursor: RankCursor, parameter: str) -> None:
        """The gradient of ``parameter`` is complete on this rank."""

    def unused(self, cursor: RankCursor, parameter: str) -> None:
        """This backward, whose first gradient is about to be complete, leaves ``parameter`` without one.

        By default it counts as a ready gradient of zeros.
        """
        self.ready(cursor, parameter)

    @abstractmethod
    def backward_end(self, cursor: RankCursor) -> None:
        """The computation of a synchronising backward is done."""

    def finalize(self, cursor: RankCursor, duration_ns: int) -> None:
        """The recorded strategy's work after its gradients arrived; by default this strategy does the same."""
        self._graph.compute(cursor, Part.FINALIZE, duration_ns)

    def read(self, cursor: RankCursor, read: Item) -> None:
        """The script reads gradients, which takes one rank ``read.duration_ns`` for all of them.

        By default they are complete when backward returns.
        """
        self._graph.compute(cursor, Part.READ, read.duration_ns)

    def optimizer(self, cursor: RankCursor, duration_ns: int) -> None:
        """The optimizer steps; ``duration_ns`` is the time for all parameters. By default it updates all of them here."""
        self._graph.compute(cursor, Part.OPTIMIZER, duration_ns)

    def lay_out_step(self, cursor: RankCursor, timeline: Timeline) -> None:
        """Add the recorded computation in order, calling the strategy's reaction at every point."""
        graph = self._graph
        blocking: Counter[tuple[int, ...]] = Counter()
        optimizer_ns = timeline.optimizer_ns
        for item in timeline.items:
            match item.kind:
                case Point.USE:
                    self.use(cursor, item.name)
                case Point.READY:
                    self.ready(cursor, item.name)
                case Point.UNUSED:
                    self.unused(cursor, item.name)
                case Point.BACKWARD_END:
                    self.backward_end(cursor)
                case Point.BLOCKING:
                    kind = item.name if item.name in KINDS else ALL_REDUCE
                    members = item.members or None
                    # A group uses a key only once over all steps; collectives of all ranks are matched by step.
                    key = blocking[item.members] + (cursor.step * BLOCKING_A_STEP if members else 0)
                    number = graph.launch(
                        cursor,
                        item.name,
                        key,
                        item.size_bytes,
                        bucket=-1,
                        selection=graph.selection_of(kind, item.size_bytes, members),
                        members=members,
                    )
                    graph.wait(cursor, item.name, number)
                    blocking[item.members] += 1
                case Point.STEP:
                    self.optimizer(cursor, optimizer_ns)
                    optimizer_ns = 0
                case Part.READ:
                    self.read(cursor, item)
                case Part.FINALIZE:
                    self.finalize(cursor, item.duration_ns)
                case Part.OPTIMIZER:
                    pass  # laid out by the strategy at the STEP point
                case _:
                    graph.compute(cursor, item.kind, item.duration_ns)


def lay_out_ranks(graph: GraphBuilder[S], layout: StepLayout, ranks: Sequence[Sequence[Timeline]]) -> None:
    """Lay out the timelines of every rank (``ranks[rank][position]``) with ``layout``."""
    for rank, timelines in enumerate(ranks):
        cursor = RankCursor(rank)
        for position, timeline in enumerate(timelines):
            cursor.step = position
            layout.lay_out_step(cursor, timeline)
            graph.boundary(cursor)
