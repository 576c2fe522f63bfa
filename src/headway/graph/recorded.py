"""Turns recorded steps into timelines: removes waits for communication, and adds the points where strategies act."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import NamedTuple

from headway.errors import TraceError
from headway.graph.computation import Item, MessageEnd, Part, Point, Timeline
from headway.graph.step_layout import background_update_cost, is_background
from headway.intervals import Intervals, merged
from headway.model import ModelSpec
from headway.trace.events import SHARDED, Event, Events, Kind
from headway.trace.format import Trace

Points = Mapping[tuple[int, int], Sequence[tuple[int, Item]]]
"""(rank, step) -> (time in ns, item): what happens when."""


class RecordedMessage(NamedTuple):
    """A message that both ranks recorded, as one event each."""

    sender: int
    sent: Event
    receiver: int
    received: Event

    @property
    def begin_ns(self) -> int:
        """When both ranks had posted it."""
        return max(self.sent.enqueue_ns, self.received.enqueue_ns)


def pipeline_messages(trace: Trace) -> Points:
    """The points of messages between stages that both ranks recorded in the same step."""
    points: dict[tuple[int, int], list[tuple[int, Item]]] = defaultdict(list)
    for message in both_ends(trace):
        for rank, row in ((message.sender, message.sent), (message.receiver, message.received)):
            posted = _item(Point.MESSAGE, row)
            points[rank, row.step].append((row.enqueue_ns, posted))
            if row.duration_ns:
                points[rank, row.step].append((row.end_ns, posted._replace(kind=Point.ARRIVED)))
    return points


def both_ends(trace: Trace) -> Iterator[RecordedMessage]:
    """The messages between stages that both sender and receiver recorded."""
    ends: dict[tuple[object, ...], list[tuple[int, Event]]] = defaultdict(list)
    for rank, events in trace.events.items():
        if (events.stage >= 0).any():
            for row in events.of_kind(Kind.SEND, Kind.RECEIVE):
                if row.stage >= 0 and row.sequence >= 0:
                    ends[_key(rank, row)].append((rank, row))
    for both in ends.values():
        if Counter(row.kind for _, row in both) == {Kind.SEND: 1, Kind.RECEIVE: 1}:
            sent, received = sorted(both, key=lambda end: end[1].kind != Kind.SEND)
            yield RecordedMessage(*sent, *received)


def _key(rank: int, row: Event) -> tuple[object, ...]:
    sender, receiver = (rank, row.peer) if row.kind == Kind.SEND else (row.peer, rank)
    return row.group, sender, receiver, row.sequence, row.step


def _item(point: str, row: Event) -> Item:
    end = MessageEnd(row.kind == Kind.SEND, row.peer, row.group, row.sequence)
    return Item(
        point, row.kind, size_bytes=row.size_bytes, stage=row.stage, micro_batch=row.micro_batch, message=end
    )


class RescaledKernels:
    """Rescales stretches of one rank, if operators or modules that match patterns take other times."""

    def __init__(self, events: Events, factors: Mapping[str, float]) -> None:
        spans = {pattern: _matched(events, pattern) for pattern in factors}
        self._found = {pattern for pattern, span in spans.items() if span}
        self._matched = [
            (Intervals(pattern_spans), factors[pattern]) for pattern, pattern_spans in spans.items()
        ]

    def matches(self, pattern: str) -> bool:
        """Whether any recorded name matches."""
        return pattern in self._found

    def duration_ns(self, start_ns: int, end_ns: int) -> int:
        """The rescaled time of the stretch from ``start_ns`` to ``end_ns``."""
        taken = float(end_ns - start_ns)
        for matched, factor in self._matched:
            taken *= 1 - matched.share_of(start_ns, end_ns) * (1 - factor)
        return round(taken)


def _matched(events: Events, pattern: str) -> list[tuple[int, int]]:
    """The spans of operators whose names match, or else of modules."""
    for kinds in ((Kind.OPERATOR,), (Kind.FORWARD, Kind.BACKWARD)):
        spans = [
            (row.start_ns, row.end_ns) for row in events.of_kind(*kinds) if fnmatchcase(row.name, pattern)
        ]
        if spans:
            return spans
    return []


def timelines_of(
    trace: Trace, factors: Mapping[str, float] = MappingProxyType({})
) -> dict[int, tuple[Timeline, ...]]:
    """Every rank's recorded steps as timelines.

    ``factors`` maps patterns to factors on the times of matching operators and kernels, or of modules if no operator
    matches. Raises TraceError for a pattern that matches nothing.
    """
    rescaled = {rank: RescaledKernels(events, factors) for rank, events in trace.events.items()}
    for pattern in factors:
        if not any(kernels.matches(pattern) for kernels in rescaled.values()):
            raise TraceError(
                "the pattern matches no recorded operator or module", got=repr(pattern),
                fix="Record operators with --detail operators, or kernels with --detail kernels.",
            )  # fmt: skip
    in_flight = collectives_in_flight(trace)
    alone = _asked_alone(trace)
    messages = pipeline_messages(trace)
    models = trace.stages or (trace.model,)
    members = {name: ranks for name, ranks in trace.manifest.groups.items() if len(ranks) < trace.world_size}
    timelines: dict[int, tuple[Timeline, ...]] = {}
    for rank, events in trace.events.items():
        share = _Share(trace.world_size, background_update_cost(events, trace.world_size).overhead_ns)
        timelines[rank] = tuple(
            _timeline(
                rank,
                step,
                events.of_step(step),
                models,
                in_flight[rank],
                share,
                rescaled[rank],
                points,
                alone.get((rank, step), frozenset()),
                members,
            )
            for step in trace.steps
            for points in (messages.get((rank, step), ()),)
        )
    return timelines


def collectives_in_flight(trace: Trace) -> dict[int, Intervals]:
    """For each rank, the intervals in which a collective was launched by every rank and not yet done."""
    arrived: dict[tuple[str, str, int], int] = {}
    for events in trace.events.values():
        for row in events.of_kind(Kind.COLLECTIVE):
            key = (row.name, row.group, row.sequence)
            arrived[key] = max(arrived.get(key, 0), row.enqueue_ns)
    return {
        rank: Intervals(
            (max(row.start_ns, arrived[row.name, row.group, row.sequence]), row.end_ns)
            for row in events.of_kind(Kind.COLLECTIVE)
        )
        for rank, events in trace.events.items()
    }


def _asked_alone(trace: Trace) -> dict[tuple[int, int], frozenset[tuple[str, int]]]:
    """The blocking collectives (name, begin) that a rank waited for in a step but that other ranks did not launch.

    A rank may use a group of some ranks only: waiting there counts as its own time.
    """
    collectives: dict[tuple[int, str], dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for rank, events in trace.events.items():
        waits = {(row.name, row.start_ns) for row in events.of_kind(Kind.WAIT)}
        for row in events.of_kind(Kind.COLLECTIVE):
            if row.bucket < 0 and (row.name, row.enqueue_ns) in waits:
                collectives[row.step, row.name][rank].append(row)
    alone: dict[tuple[int, int], set[tuple[str, int]]] = defaultdict(set)
    for (step, name), of_rank in collectives.items():
        if _as_often(trace, of_rank):
            for rank, rows in of_rank.items():
                alone[rank, step] |= {
                    (name, row.enqueue_ns) for row in rows if not _asked_by_all(trace, row, of_rank)
                }
            continue
        of_all_ranks = {
            rank: [row for row in rows if len(trace.members(row.group)) == trace.world_size]
            for rank, rows in of_rank.items()
        }
        kept = of_all_ranks if _as_often(trace, of_all_ranks) else {}
        for rank, rows in of_rank.items():
            together = kept.get(rank, ())
            alone[rank, step] |= {(name, row.enqueue_ns) for row in rows if row not in together}
    return {key: frozenset(keys) for key, keys in alone.items()}


def _asked_by_all(trace: Trace, collective: Event, rows: Mapping[int, Sequence[Event]]) -> bool:
    """Whether all members of a collective's group are recorded and wait for the same number of its collectives."""
    members = trace.members(collective.group)
    counts = {sum(row.group == collective.group for row in rows.get(rank, ())) for rank in members}
    return len(counts) == 1 and (len(members) > 1 or trace.world_size == 1)


def _as_often(trace: Trace, rows: Mapping[int, Sequence[Event]]) -> bool:
    return len({len(rows.get(rank, ())) for rank in trace.events}) == 1


class _Share(NamedTuple):
    """One rank's updates off its main thread: the number of ranks that share them, and the overhead of each."""

    ranks: int
    overhead_ns: float

    def whole_ns(self, rows: Iterable[Event]) -> int | None:
        in_background = [row.duration_ns - self.overhead_ns for row in rows if is_background(row)]
        return round(max(0.0, sum(in_background)) * self.ranks) if in_background else None


class _Cut(NamedTuple):
    time_ns: int
    order: int
    item: Item | None


def _timeline(
    rank: int,
    step: int,
    events: Events,
    models: Sequence[ModelSpec],
    in_flight: Intervals,
    share: _Share,
    rescaled: RescaledKernels,
    messages: Sequence[tuple[int, Item]],
    alone: Set[tuple[str, int]],
    members: Mapping[str, tuple[int, ...]],
) -> Timeline:
    rows = [row for row in events if row.kind != Kind.WAIT or (row.name, row.start_ns) not in alone]
    window = next(row for row in rows if row.kind == Kind.STEP)
    waits = list(merged((row.start_ns, row.end_ns) for row in rows if row.kind == Kind.WAIT))
    shared_reads = [
        (row.start_ns, row.end_ns) for row in rows if row.kind == Kind.READ and row.algorithm == SHARDED
    ]
    parts = _parts(rows)
    cuts = _points(rows, models, members) + [_Cut(time_ns, 2, item) for time_ns, item in messages]
    for start_ns, end_ns in [
        *waits,
        *((part.start_ns, part.end_ns) for part in parts),
        (window.start_ns, window.end_ns),
    ]:
        cuts += [_Cut(start_ns, 1, None), _Cut(end_ns, 1, None)]
    items: list[Item] = []
    now_ns = window.start_ns
    for cut in sorted(cuts, key=lambda cut: (cut.time_ns, cut.order)):
        time_ns = min(max(cut.time_ns, window.start_ns), window.end_ns)
        if time_ns > now_ns:
            if not _inside(now_ns, waits):
                overlap = in_flight.share_of(now_ns, time_ns)
                duration_ns = rescaled.duration_ns(now_ns, time_ns)
                if _inside(now_ns, shared_reads):
                    duration_ns *= share.ranks
                items.append(_part_at(now_ns, parts)._replace(duration_ns=duration_ns, overlap=overlap))
            now_ns = time_ns
        if cut.item is not None:
            items.append(cut.item)
    return Timeline(rank, step, tuple(_joined(items)), share.whole_ns(rows))


def _points(
    rows: Sequence[Event], models: Sequence[ModelSpec], members: Mapping[str, tuple[int, ...]]
) -> list[_Cut]:
    """The points of a step; ``models`` has the model of each stage, ``members`` the groups that lack some ranks."""
    owners = {id(model): frozenset(model.forward_order) for model in models}
    synchronising = _synchronising(rows)
    shares = [row for row in rows if row.kind == Kind.BACKWARD]
    blocking = {(r.name, r.enqueue_ns): r for r in rows if r.kind == Kind.COLLECTIVE and r.bucket < 0}
    cuts = []
    for row in rows:
        if row.kind == Kind.FORWARD and row.name in owners[id(_model_of(row, models))]:
            cuts.append(_Cut(row.start_ns, 2, _labelled(Point.USE, row)))
        elif row.kind == Kind.READ:
            cuts.append(_Cut(row.start_ns, 2, Item(Part.READ, row.name, parameters=_read(row, rows))))
        elif row.kind == Kind.OPTIMIZER:
            cuts.append(_Cut(row.start_ns, 2, Item(Point.STEP, row.name)))
        elif row.kind == Kind.WAIT and (event := blocking.get((row.name, row.start_ns))) is not None:
            group = members.get(event.group, ())
            cuts.append(
                _Cut(row.start_ns, 2, Item(Point.BLOCKING, row.name, 0, event.size_bytes, members=group))
            )
    for backward in synchronising:
        model = _model_of(backward, models)
        ready = [
            r
            for r in rows
            if r.kind == Kind.GRADIENT_READY and backward.start_ns <= r.start_ns <= backward.end_ns
        ]
        if model.find_unused_parameters:
            begins_ns = min((row.start_ns for row in ready), default=backward.start_ns)
            unused = [p.name for p in model.parameters if p.name not in {row.name for row in ready}]
            label = _labelled(Point.UNUSED, backward)
            cuts += [_Cut(begins_ns, 2, label._replace(name=name)) for name in unused]
        cuts += [_Cut(row.start_ns, 2, _labelled(Point.READY, row)) for row in ready]
        ends = [row.end_ns for row in shares if backward.start_ns <= row.start_ns <= backward.end_ns]
        cuts.append(_Cut(max(ends, default=backward.end_ns), 3, _labelled(Point.BACKWARD_END, backward)))
    return cuts


def _model_of(row: Event, models: Sequence[ModelSpec]) -> ModelSpec:
    return models[row.stage] if 0 <= row.stage < len(models) else models[0]


def _read(read: Event, rows: Sequence[Event]) -> tuple[str, ...]:
    """The parameters of a read; empty if it reads all."""
    return tuple(row.name for row in rows if row.kind == Kind.GRADIENT_READ and row.start_ns == read.start_ns)


def _synchronising(rows: Sequence[Event]) -> Sequence[Event]:
    """The backward passes whose gradients are reduced; others (no_sync) only accumulate."""
    passes = [row for row in rows if row.kind == Kind.BACKWARD_PASS]
    launches_ns = [row.enqueue_ns for row in rows if row.kind == Kind.COLLECTIVE and row.bucket >= 0]
    return [p for p in passes if any(p.start_ns <= ns <= p.end_ns for ns in launches_ns)] or passes[-1:]


class _Interval(NamedTuple):
    start_ns: int
    end_ns: int
    of: Item


def _parts(rows: Sequence[Event]) -> list[_Interval]:
    """Intervals with their parts; where they overlap, the later one in the list wins."""
    shares_end_ns = max((row.end_ns for row in rows if row.kind == Kind.BACKWARD), default=0)
    parts = []
    for row in rows:
        if row.kind == Kind.FORWARD_PASS:
            parts.append(_Interval(row.start_ns, row.end_ns, _labelled(Part.FORWARD, row)))
        elif row.kind == Kind.BACKWARD_PASS:
            parts.append(_Interval(row.start_ns, row.end_ns, _labelled(Part.BACKWARD, row)))
            if row.start_ns <= shares_end_ns < row.end_ns:
                parts.append(_Interval(shares_end_ns, row.end_ns, _labelled(Part.FINALIZE, row)))
        elif row.kind == Kind.INPUT:
            parts.append(_Interval(row.start_ns, row.end_ns, Item(Part.INPUT)))
    # A deferred update runs during the next forward but is optimizer work. If updates run off the main thread, only
    # their results are copied there: that is part of forward.
    kinds = (Kind.OPTIMIZER,) if any(is_background(row) for row in rows) else (Kind.OPTIMIZER, Kind.UPDATE)
    parts += [_Interval(r.start_ns, r.end_ns, Item(Part.READ)) for r in rows if r.kind == Kind.READ]
    return parts + [_Interval(r.start_ns, r.end_ns, Item(Part.OPTIMIZER)) for r in rows if r.kind in kinds]


def _labelled(part: str, row: Event) -> Item:
    name = row.name if part in (Point.USE, Point.READY) else ""
    return Item(part, name, stage=max(0, row.stage), micro_batch=row.micro_batch)


def _part_at(time_ns: int, parts: Sequence[_Interval]) -> Item:
    item = Item(Part.REST)
    for part in parts:
        if part.start_ns <= time_ns < part.end_ns:
            item = part.of
    return item


def _inside(time_ns: int, intervals: Sequence[tuple[int, int]]) -> bool:
    return any(start_ns <= time_ns < end_ns for start_ns, end_ns in intervals)


def _joined(items: Sequence[Item]) -> list[Item]:
    """Join adjacent stretches of one part, and a read's stretch with its begin."""
    joined: list[Item] = []
    for item in items:
        before = joined[-1] if joined else None
        if (
            before is not None
            and item.duration_ns
            and (before.kind, before.stage, before.micro_batch) == (item.kind, item.stage, item.micro_batch)
            and (before.duration_ns or item.kind == Part.READ)
        ):
            total_ns = before.duration_ns + item.duration_ns
            disturbed = before.overlap * before.duration_ns + item.overlap * item.duration_ns
            joined[-1] = before._replace(duration_ns=total_ns, overlap=disturbed / total_ns)
        else:
            joined.append(item)
    return joined
