"""Chooses what the timeline draws: a bounded set of boxes, ranks and steps, and the critical path."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt

from headway.arrays import Ints
from headway.diagnosis import Diagnosis
from headway.diagnosis.breakdown import COMPUTE_KINDS, REST, Breakdown, Segment, segments
from headway.diagnosis.communication import Communications, match
from headway.report import words
from headway.report.words import KIND_LABELS
from headway.trace.events import Event, Events, Kind, Stream
from headway.trace.format import Trace
from headway.units import counted, format_bytes

COMPUTE, OPERATORS, COMMUNICATION = "compute", "operators", "communication"
LANES = 3  # rows for overlapping communication of one rank

_NS_A_MS = 1e6
_WHOLE = {Kind.FORWARD_PASS: Kind.FORWARD, Kind.BACKWARD_PASS: Kind.BACKWARD}
_NOT_SPANS = (Kind.STEP, Kind.GRADIENT_READY, Kind.OPERATOR)


@dataclass(frozen=True, slots=True)
class Box:
    """One rectangle on ``row`` of ``rank``, in ``lane``. Times are milliseconds from the drawing's start."""

    rank: int
    row: str
    lane: int
    start_ms: float
    end_ms: float
    kind: str
    name: str
    step: int
    detail: str = ""
    pending_ms: float = 0.0  # from its request to its start

    @property
    def length_ms(self) -> float:
        """Its duration."""
        return self.end_ms - self.start_ms


@dataclass(frozen=True, slots=True)
class Window:
    """The stretch of time that is drawn."""

    start_ns: int
    end_ns: int

    def ms(self, moment_ns: int) -> float:
        """Milliseconds from the drawing's start."""
        return (moment_ns - self.start_ns) / _NS_A_MS

    def of(self, events: Events) -> Events:
        """The events that overlap with the window."""
        return events.where((events.start_ns < self.end_ns) & (events.end_ns > self.start_ns))


def compute_boxes(rank: int, events: Events, window: Window, coarse: bool) -> Iterator[Box]:
    """The flattened compute stream: each moment shows its innermost event. ``coarse`` draws one box per pass."""
    steps = events.of_kind(Kind.STEP)
    flat = segments(events.where(events.kind != Kind.OPERATOR), window.start_ns, window.end_ns)
    for segment in _merge_passes(flat) if coarse else flat:
        if segment.kind == REST:
            continue
        place = max(int(np.searchsorted(steps.start_ns, segment.start_ns, side="right")) - 1, 0)
        yield Box(
            rank, COMPUTE, 0, window.ms(segment.start_ns), window.ms(segment.end_ns), segment.kind, segment.name,
            int(steps.step[place]) if len(steps) else -1,
            f"bucket {segment.bucket}" if segment.bucket >= 0 else "",
        )  # fmt: skip


def _merge_passes(flat: list[Segment]) -> list[Segment]:
    """Merges adjacent segments of the same pass."""
    merged: list[Segment] = []
    for segment in flat:
        segment = segment._replace(kind=_WHOLE.get(segment.kind, segment.kind))
        if merged and segment.kind in _WHOLE.values() and merged[-1].kind == segment.kind:
            merged[-1] = merged[-1]._replace(end_ns=segment.end_ns, name="")
        else:
            merged.append(segment)
    return merged


def operator_boxes(rank: int, events: Events, window: Window, step: int | None = None) -> Iterator[Box]:
    """The operators on the compute stream, of one step or of all; nested operators follow their parents."""
    picked = (events.kind == Kind.OPERATOR) & (events.stream == Stream.COMPUTE) & (events.duration_ns > 0)
    if step is not None:
        picked &= events.step == step
    rows = window.of(events.where(picked))
    for event in sorted(rows, key=lambda event: (event.start_ns, -event.end_ns)):
        yield _plain(rank, OPERATORS, event, window)


def other_boxes(rank: int, events: Events, window: Window, matched: Collection[str]) -> Iterator[Box]:
    """Events neither in the flattened compute stream nor of the kinds ``matched``, such as pushes and pulls."""
    shown = (events.stream == Stream.COMPUTE) & np.isin(events.kind.astype(str), COMPUTE_KINDS)
    wanted = ~shown & (events.duration_ns > 0)
    for kind in (*matched, *_NOT_SPANS):
        wanted &= events.kind != kind
    for event in window.of(events.where(wanted)):
        if event.kind in KIND_LABELS:
            row = COMMUNICATION if event.stream == Stream.COMMUNICATION else COMPUTE
            yield _plain(rank, row, event, window)


def _plain(rank: int, row: str, event: Event, window: Window) -> Box:
    details = [format_bytes(event.size_bytes)] if event.size_bytes >= 0 else []
    details += [f"peer rank {event.peer}"] if event.peer >= 0 else []
    pending_ns = event.start_ns - event.enqueue_ns if 0 <= event.enqueue_ns < event.start_ns else 0
    return Box(
        rank, row, 0, window.ms(event.start_ns), window.ms(event.end_ns), event.kind, event.name, event.step,
        ", ".join(details), pending_ns / _NS_A_MS,
    )  # fmt: skip


def communication_boxes(rank: int, rank_rows: Communications, window: Window) -> Iterator[Box]:
    """Collectives and messages, drawn from the last arrival on. ``rank_rows`` are this rank's rows in the window."""
    for row in range(len(rank_rows)):
        begin = max(int(rank_rows.start_ns[row]), int(rank_rows.arrival_ns[row]))
        enqueue, arrival = int(rank_rows.enqueue_ns[row]), int(rank_rows.arrival_ns[row])
        yield Box(
            rank, COMMUNICATION, 0, window.ms(begin), window.ms(int(rank_rows.end_ns[row])), rank_rows.kind[row],
            rank_rows.name[row], int(rank_rows.step[row]), ", ".join(_details(rank_rows, row)),
            (begin - enqueue) / _NS_A_MS,
        )  # fmt: skip
        assert begin >= arrival


def _details(rank_rows: Communications, row: int) -> Iterator[str]:
    yield format_bytes(int(rank_rows.size_bytes[row]))
    if rank_rows.bucket[row] >= 0:
        yield f"bucket {rank_rows.bucket[row]}"
    if rank_rows.peer[row] >= 0:
        yield f"{'from' if rank_rows.kind[row] == Kind.RECEIVE else 'to'} rank {rank_rows.peer[row]}"
    if rank_rows.group[row]:
        yield f"group {words.plain(rank_rows.group[row], 40)}"
    late_ns = int(rank_rows.arrival_ns[row]) - int(rank_rows.enqueue_ns[row])
    if late_ns > 0:
        yield f"rank {rank_rows.last_rank[row]} arrived last, {words.duration(late_ns / _NS_A_MS)} after this one"


def assign_lanes(boxes: list[Box]) -> list[Box]:
    """Assigns one rank's communication to lanes, so that overlapping boxes lie below each other."""
    free = [float("-inf")] * LANES
    placed = []
    for box in sorted(boxes, key=lambda box: box.start_ms):
        lane = next((lane for lane in range(LANES) if free[lane] <= box.start_ms), LANES - 1)
        free[lane] = max(free[lane], box.end_ms)
        placed.append(replace(box, lane=lane))
    return placed


MAX_RANKS = 256
DEFAULT_STEPS = 3
MAX_OPERATOR_RANKS = 8

MESSAGES = (Kind.SEND, Kind.RECEIVE)
MODULES = (Kind.FORWARD, Kind.BACKWARD)
_UNDRAWN = (Kind.GRADIENT_READY, Kind.STEP, Kind.LINK, Kind.DELIVERY_RATE)


@dataclass(frozen=True, slots=True)
class Choice:
    """What to draw.

    ``coarse`` draws each pass as one box. If ``operators`` is false, only operators of the typical step on
    ``operator_ranks`` are drawn. ``left_out`` counts the events of the drawn steps that are left out, by level of
    detail.
    """

    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    coarse: bool
    messages: bool
    operators: bool
    operator_ranks: tuple[int, ...]
    left_out: dict[str, int]


def choose(trace: Trace, diagnosis: Diagnosis, max_boxes: int) -> Choice:
    """Chooses complete steps around the typical one, as many as ``max_boxes`` allows.

    If not even a few steps fit, detail is dropped in this order: operators, messages within collectives, modules.
    """
    ranks = _ranks(trace, diagnosis)
    counts = _Counts.of((trace.events[rank] for rank in ranks), diagnosis.steps)
    wanted = min(DEFAULT_STEPS, len(diagnosis.steps))
    at = diagnosis.steps.index(diagnosis.typical_step)
    for left_out in counts.levels():
        sizes = counts.total - sum((getattr(counts, name) for name in left_out), np.zeros_like(counts.total))
        low, high = _grow(sizes, at, max_boxes)
        if high - low >= wanted and sizes[low:high].sum() <= max_boxes:
            break
    room = max_boxes - int(sizes[low:high].sum())
    some = _operator_ranks(trace, diagnosis, ranks, room) if "operators" in left_out else ()
    return Choice(
        ranks=ranks,
        steps=diagnosis.steps[low:high],
        coarse="modules" in left_out,
        messages="messages" not in left_out,
        operators="operators" not in left_out,
        operator_ranks=some,
        left_out={name: int(getattr(counts, name)[low:high].sum()) for name in left_out},
    )


def blamed_ranks(diagnosis: Diagnosis) -> tuple[int, ...]:
    """The ranks to blame, worst first: those of findings that stand out, then stragglers.

    Stragglers are not blamed if ranks take turns at being late, or are late within noise.
    """
    named = [rank for finding in diagnosis.findings if finding.stands_out for rank in finding.ranks]
    if not diagnosis.findings or any(
        finding.cause == "straggler" and finding.stands_out for finding in diagnosis.findings
    ):
        named += [straggler.rank for straggler in diagnosis.stragglers]
    return tuple(rank for rank in dict.fromkeys(named) if rank in diagnosis.breakdown)


def interesting_ranks(diagnosis: Diagnosis) -> tuple[int, ...]:
    """The ranks that the diagnosis names: those to blame, worst first, then those on the critical path."""
    on_path = (piece.rank for piece in diagnosis.critical_path)
    return tuple(dict.fromkeys((*blamed_ranks(diagnosis), *on_path)))


def what_is_left_out(choice: Choice, trace: Trace, diagnosis: Diagnosis) -> str:
    """Sentences on what ``choice`` leaves out; empty if it draws everything."""
    parts = []
    steps, ranks = choice.steps, choice.ranks
    if len(ranks) < len(trace.events):
        parts.append(
            f"{len(ranks)} of {counted(len(trace.events), 'rank')} are drawn: those to blame or on the critical path, "
            "and an even selection of the others."
        )
    if len(steps) < len(diagnosis.steps):
        parts.append(
            f"Steps {steps[0]} to {steps[-1]} of {diagnosis.steps[0]} to {diagnosis.steps[-1]} are drawn, around the "
            "typical one, to keep this page small."
        )
    if choice.left_out.get("operators"):
        only = words.runs(choice.operator_ranks) or f"{len(choice.operator_ranks)} ranks"
        where = f"only in step {diagnosis.typical_step} on rank{'s' * (only.isdigit() is False)} {only}"
        parts.append(f"Operators are drawn {where if choice.operator_ranks else 'nowhere'}.")
    if choice.left_out.get("messages"):
        number = counted(choice.left_out["messages"], "send or receive", "sends and receives")
        parts.append(f"Collectives are drawn without their messages ({number} left out).")
    if choice.coarse:
        parts.append("Each pass is drawn as one box, not module by module.")
    return " ".join(parts)


def _ranks(trace: Trace, diagnosis: Diagnosis) -> tuple[int, ...]:
    """All ranks, or at most MAX_RANKS: those that the diagnosis names and an even selection of the others."""
    present = sorted(trace.events)
    if len(present) <= MAX_RANKS:
        return tuple(present)
    named = [rank for rank in interesting_ranks(diagnosis) if rank in trace.events][: MAX_RANKS // 2]
    remaining = sorted(set(present) - set(named))
    picked = np.linspace(0, len(remaining) - 1, MAX_RANKS - len(named)).round().astype(int)
    return tuple(sorted({*named, *(remaining[index] for index in picked.tolist())}))


@dataclass(frozen=True, slots=True)
class _Counts:
    """The events per step over all ranks: all that could be drawn, and those of each level of detail."""

    total: Ints
    operators: Ints
    messages: Ints
    collectives: Ints
    modules: Ints

    @classmethod
    def of(cls, ranks: Iterable[Events], steps: tuple[int, ...]) -> _Counts:
        numbers = np.array(steps, dtype=np.int64)
        sums = np.zeros((6, len(numbers)), dtype=np.int64)
        for events in ranks:
            kinds = ((), (Kind.OPERATOR,), MESSAGES, (Kind.COLLECTIVE,), MODULES, _UNDRAWN)
            for row, wanted in enumerate(kinds):
                event_steps = events.step if not wanted else events.step[_of_kinds(events, wanted)]
                place = np.minimum(np.searchsorted(numbers, event_steps), len(numbers) - 1)
                sums[row] += np.bincount(place[numbers[place] == event_steps], minlength=len(numbers))
        return cls(sums[0] - sums[5], *sums[1:5])

    def levels(self) -> list[tuple[str, ...]]:
        """The levels to leave out, from none to all."""
        levels: list[tuple[str, ...]] = [()]
        for name in ("operators", "messages", "modules"):
            some = getattr(self, name).any() and (name != "messages" or self.collectives.any())
            if some:
                levels.append((*levels[-1], name))
        return levels


def _of_kinds(events: Events, kinds: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    mask = np.zeros(len(events), dtype=bool)
    for kind in kinds:
        mask |= events.kind == kind
    return mask


def _grow(sizes: Ints, at: int, room: int) -> tuple[int, int]:
    """The range of steps around ``at``, grown on both sides while all events fit; the end is exclusive."""
    low, high = at, at + 1
    total = int(sizes[at])
    while low > 0 or high < len(sizes):
        go_low = low > 0 and (high == len(sizes) or at - low <= high - 1 - at)
        size = int(sizes[low - 1 if go_low else high])
        if total + size > room:
            break
        total += size
        low, high = (low - 1, high) if go_low else (low, high + 1)
    return low, high


def _operator_ranks(trace: Trace, diagnosis: Diagnosis, ranks: tuple[int, ...], room: int) -> tuple[int, ...]:
    """Ranks whose operators of the typical step fit: those that the diagnosis names, and one to compare."""
    named = [rank for rank in interesting_ranks(diagnosis) if rank in ranks]
    chosen = []
    for rank in [*named[:MAX_OPERATOR_RANKS], *[rank for rank in ranks if rank not in named][:1]]:
        events = trace.events[rank]
        size = int(np.count_nonzero((events.kind == Kind.OPERATOR) & (events.step == diagnosis.typical_step)))
        if 0 < size <= room:
            chosen.append(rank)
            room -= size
    return tuple(sorted(chosen))


ALL_SHOWN = 12  # tables of up to this many ranks show all of them
SHOWN_FIRST = 8  # larger tables show this many first
NEIGHBOURS = 2
MAX_BLAMED_VIEWS = 3
MAX_HOST_VIEWS = 128


@dataclass(frozen=True, slots=True)
class RankView:
    """A selection of ranks that the timeline can be narrowed to."""

    label: str
    ranks: tuple[int, ...]


def rank_views(
    drawn: tuple[int, ...],
    hosts: Mapping[int, str],
    blamed: tuple[int, ...],
    on_path: tuple[int, ...],
    *,
    of_ranks: int,
) -> tuple[RankView, ...]:
    """The views of the timeline: all ranks, blamed ranks with neighbours, the critical path, and each host.

    ``of_ranks`` counts all ranks, drawn or not. Views that repeat an earlier one are left out.
    """
    every = "All" if len(drawn) == of_ranks else "All drawn:"
    all_ranks = RankView(f"{every} {counted(len(drawn), 'rank')}", drawn)
    views = [all_ranks]

    def offer(label: str, ranks: tuple[int, ...]) -> None:
        if ranks and all(ranks != view.ranks for view in views):
            views.append(RankView(label, ranks))

    for rank in [rank for rank in blamed if rank in drawn][:MAX_BLAMED_VIEWS]:
        at = drawn.index(rank)
        offer(f"Rank {rank} and its neighbours", drawn[max(at - NEIGHBOURS, 0) : at + NEIGHBOURS + 1])
    offer("On the critical path", tuple(rank for rank in drawn if rank in on_path))
    of_host: dict[str, list[int]] = {}
    for rank in drawn:
        of_host.setdefault(hosts.get(rank, ""), []).append(rank)
    for host, ranks in list(of_host.items())[:MAX_HOST_VIEWS]:
        if len(ranks) > 1:
            label = f"Host {words.plain(host, 60) or 'without a name'}"
            offer(f"{label}: rank {words.runs(ranks)}" if words.runs(ranks) else label, tuple(ranks))
    return tuple(views)


def split_by_interest(
    breakdown: Mapping[int, Breakdown], blamed: tuple[int, ...]
) -> tuple[list[int], list[int]]:
    """Splits the ranks into those to show first and the others.

    Few ranks are all shown, in order. Of many, blamed ranks come first, then those that differ most from the median
    rank; the others follow in order.
    """
    ranks = sorted(breakdown)
    if len(ranks) <= ALL_SHOWN:
        return ranks, []
    parts = np.array([list(asdict(breakdown[rank]).values()) for rank in ranks])
    distance = np.abs(parts - np.median(parts, axis=0)).sum(axis=1)
    by_distance = [ranks[index] for index in np.argsort(-distance, kind="stable").tolist()]
    first = [*(rank for rank in blamed if rank in breakdown), *by_distance]
    first = list(dict.fromkeys(first))[:SHOWN_FIRST]
    return first, [rank for rank in ranks if rank not in first]


MAX_BOXES = 20_000

_DETAIL_KINDS = (*MESSAGES, Kind.OPERATOR)


@dataclass(frozen=True, slots=True)
class Drawing:
    """The boxes of all drawn ranks over some steps, and where the steps and the critical path lie."""

    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]
    steps: tuple[tuple[int, float, float], ...]  # number, start, end
    view_ms: tuple[float, float]
    path: tuple[
        tuple[int, str, float, float], ...
    ]  # rank, kind, start, end: one for each of the diagnosis' pieces
    length_ms: float
    cut: str  # sentences on what is left out

    @property
    def lanes(self) -> int:
        """The number of lanes that communication needs."""
        return 1 + max((box.lane for box in self.boxes), default=0)


def draw(
    trace: Trace, diagnosis: Diagnosis, max_boxes: int = MAX_BOXES, rows: Communications | None = None
) -> Drawing:
    """Chooses what to draw and computes its boxes. ``rows`` is the trace's matched communication, if known."""
    choice = choose(trace, diagnosis, max_boxes)
    bounds = _bounds(trace, choice)
    window = Window(min(start for start, _ in bounds.values()), max(end for _, end in bounds.values()))
    boxes = _boxes(trace, diagnosis, choice, window, match(trace, messages=True) if rows is None else rows)
    box_count = len(boxes)
    cut = what_is_left_out(choice, trace, diagnosis)
    if box_count > max_boxes:
        boxes = sorted(boxes, key=lambda box: (box.kind in _DETAIL_KINDS, -box.length_ms))[:max_boxes]
        boxes.sort(key=lambda box: (box.rank, box.row, box.start_ms, -box.end_ms))
        cut += f" The {max_boxes} longest of {counted(box_count, 'event')} are drawn."
    at = choice.steps.index(diagnosis.typical_step)
    first = max(min(at - 1, len(choice.steps) - DEFAULT_STEPS), 0)
    shown = choice.steps[first : first + DEFAULT_STEPS]
    return Drawing(
        ranks=choice.ranks,
        boxes=tuple(boxes),
        steps=tuple((step, window.ms(start), window.ms(end)) for step, (start, end) in bounds.items()),
        view_ms=(window.ms(bounds[shown[0]][0]), window.ms(bounds[shown[-1]][1])),
        path=tuple(
            (piece.rank, piece.kind, window.ms(piece.start_ns), window.ms(piece.end_ns))
            for piece in diagnosis.critical_path
        ),
        length_ms=window.ms(window.end_ns),
        cut=cut.strip(),
    )


def _bounds(trace: Trace, choice: Choice) -> dict[int, tuple[int, int]]:
    """Each step's earliest start and latest end over ranks, in ns."""
    bounds: dict[int, tuple[int, int]] = {}
    wanted = set(choice.steps)
    for rank in choice.ranks:
        for row in trace.events[rank].of_kind(Kind.STEP):
            if row.step in wanted:
                start, end = bounds.get(row.step, (row.start_ns, row.end_ns))
                bounds[row.step] = (min(start, row.start_ns), max(end, row.end_ns))
    return dict(sorted(bounds.items()))


def _boxes(
    trace: Trace, diagnosis: Diagnosis, choice: Choice, window: Window, rows: Communications
) -> list[Box]:
    matched = {Kind.COLLECTIVE, *MESSAGES, *rows.kind.tolist()}
    near = (rows.enqueue_ns < window.end_ns) & (rows.end_ns > window.start_ns)
    if not choice.messages:
        near &= (rows.kind != Kind.SEND) & (rows.kind != Kind.RECEIVE)
    rows = rows.where(near)
    rows = rows.where(np.argsort(rows.rank, kind="stable"))
    boxes: list[Box] = []
    for rank in choice.ranks:
        events = window.of(trace.events[rank])
        rank_rows = rows.where(np.arange(*np.searchsorted(rows.rank, [rank, rank + 1])))
        boxes += compute_boxes(rank, events, window, choice.coarse)
        if choice.operators or rank in choice.operator_ranks:
            boxes += operator_boxes(
                rank, events, window, None if choice.operators else diagnosis.typical_step
            )
        further = list(other_boxes(rank, events, window, matched))
        boxes += (box for box in further if box.row != COMMUNICATION)
        others_communicating = (box for box in further if box.row == COMMUNICATION)
        boxes += assign_lanes([*communication_boxes(rank, rank_rows, window), *others_communicating])
    return boxes
