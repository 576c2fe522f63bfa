"""Splits each rank's step time into computation, waits, input, optimizer and rest; the parts add up to the step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headway import intervals
from headway.arrays import Ints
from headway.diagnosis.communication import Communications
from headway.intervals import Spans
from headway.trace.events import Events, Kind, Stream

COMPUTE_KINDS = (
    Kind.PAUSE, Kind.IDLE,
    Kind.INPUT, Kind.FORWARD_PASS, Kind.FORWARD, Kind.BACKWARD_PASS, Kind.BACKWARD,
    Kind.WAIT, Kind.READ, Kind.OPTIMIZER, Kind.UPDATE,
)  # fmt: skip

REST = "rest"


@dataclass(frozen=True, slots=True, eq=False)
class RankTime:
    """One rank's time as disjoint sets of intervals, with the windows of the recorded steps (ns on rank 0's clock).

    Where events overlap, the first of these counts: wait, optimizer, input, backward, forward. A wait is ``exposed``
    communication while some collective in flight has all its members, and ``straggling`` while every collective in
    flight still lacks one; other waits count as rest. ``paused`` is time within input waits that the program spent on
    something else, such as garbage collection; it does not count as input.
    """

    rank: int
    step_start_ns: Ints
    step_end_ns: Ints
    wait: Spans
    exposed: Spans
    straggling: Spans
    optimizer: Spans
    input: Spans
    paused: Spans
    backward: Spans
    forward: Spans
    communicating: Spans

    def per_step(self, spans: Spans) -> Ints:
        """How much of ``spans`` lies in each recorded step, in nanoseconds."""
        return intervals.length_within(spans, self.step_start_ns, self.step_end_ns)

    @property
    def busy_ms(self) -> npt.NDArray[np.float64]:
        """The length of each recorded step without its waits, in ms; shape (steps,)."""
        whole_ns = self.step_end_ns - self.step_start_ns - self.per_step(self.wait)
        return whole_ns.astype(np.float64) / 1e6


def rank_time(rank: int, events: Events, steps: tuple[int, ...], rank_rows: Communications) -> RankTime:
    """Sorts one rank's time. ``rank_rows`` is this rank's communication; each of ``steps`` must have a step event."""
    bounds = {row.step: (row.start_ns, row.end_ns) for row in reversed(list(events.of_kind(Kind.STEP)))}
    windows = np.array([bounds[step] for step in steps], dtype=np.int64).reshape(-1, 2)
    wait = _spans(events, Kind.WAIT)
    optimizer = intervals.subtract(_spans(events, Kind.OPTIMIZER), wait)
    taken = intervals.join(wait, optimizer)
    all_input = intervals.subtract(_spans(events, Kind.INPUT), taken)
    paused = intervals.intersect(all_input, _spans(events, Kind.PAUSE))
    taken = intervals.join(taken, all_input)
    backward = intervals.subtract(_spans(events, Kind.BACKWARD_PASS, Kind.BACKWARD), taken)
    taken = intervals.join(taken, backward)
    forward = intervals.subtract(_spans(events, Kind.FORWARD_PASS, Kind.FORWARD, Kind.UPDATE), taken)
    communicating = intervals.union(rank_rows.arrival_ns, rank_rows.end_ns)
    pending = intervals.union(rank_rows.enqueue_ns, rank_rows.arrival_ns)
    return RankTime(
        rank=rank,
        step_start_ns=windows[:, 0],
        step_end_ns=windows[:, 1],
        wait=wait,
        exposed=intervals.intersect(wait, communicating),
        straggling=intervals.subtract(intervals.intersect(wait, pending), communicating),
        optimizer=optimizer,
        input=intervals.subtract(all_input, paused),
        paused=paused,
        backward=backward,
        forward=forward,
        communicating=communicating,
    )


def _spans(events: Events, *kinds: str) -> Spans:
    rows = events.of_kind(*kinds)
    rows = rows.where(rows.stream == Stream.COMPUTE)
    return intervals.union(rows.start_ns, rows.end_ns)


class Segment(NamedTuple):
    """A stretch of one rank's compute stream with one label. ``kind`` is an event's kind, or ``rest``."""

    start_ns: int
    end_ns: int
    kind: str
    name: str
    bucket: int = -1


def segments(events: Events, start_ns: int, end_ns: int) -> list[Segment]:
    """Flattens the compute stream between two times: the innermost event covers each moment, gaps become ``rest``."""
    wanted = (events.stream == Stream.COMPUTE) & np.isin(events.kind.astype(str), COMPUTE_KINDS)
    wanted &= (events.start_ns < end_ns) & (events.end_ns > start_ns) & (events.duration_ns > 0)
    rows = [
        Segment(max(e.start_ns, start_ns), min(e.end_ns, end_ns), e.kind, e.name, e.bucket)
        for e in events.where(wanted)
    ]
    rows.sort(key=lambda row: (row.start_ns, -row.end_ns))
    flat: list[Segment] = []
    stack: list[Segment] = []
    cursor = start_ns

    def advance(until_ns: int) -> None:
        nonlocal cursor
        while stack and stack[-1].end_ns <= until_ns:
            top = stack.pop()
            if top.end_ns > cursor:
                flat.append(top._replace(start_ns=cursor))
                cursor = top.end_ns
        if until_ns > cursor:
            flat.append(
                stack[-1]._replace(start_ns=cursor, end_ns=until_ns)
                if stack
                else Segment(cursor, until_ns, REST, "")
            )
            cursor = until_ns

    for row in rows:
        advance(row.start_ns)
        stack.append(row)
    advance(end_ns)
    return flat


NS_A_MS = 1e6


@dataclass(frozen=True, slots=True)
class Breakdown:
    """One rank's mean step in milliseconds. The parts add up to the step."""

    computation: float  # forward, backward and deferred updates, without their waits
    exposed_communication: float  # waiting while a collective with all its members was in flight
    straggler_wait: float  # waiting while every collective in flight still lacked a member
    input: float  # waiting for the data loader
    optimizer: float
    rest: float  # everything that no event explains

    @property
    def total_ms(self) -> float:
        """The sum of the parts: the mean step."""
        return float(sum(asdict(self).values()))

    def rounded(self) -> dict[str, float]:
        """The parts by name, to the nanosecond."""
        return {part: round(value, 6) for part, value in asdict(self).items()}


PARTS: tuple[str, ...] = tuple(field.name for field in fields(Breakdown))


def breakdown(time: RankTime) -> Breakdown:
    """Splits one rank's mean recorded step. Integer nanoseconds are summed, so the parts add up exactly."""
    steps = len(time.step_start_ns)
    parts_ns = {
        "computation": time.per_step(time.forward).sum() + time.per_step(time.backward).sum(),
        "exposed_communication": time.per_step(time.exposed).sum(),
        "straggler_wait": time.per_step(time.straggling).sum(),
        "input": time.per_step(time.input).sum(),
        "optimizer": time.per_step(time.optimizer).sum(),
    }
    total_ns = int((time.step_end_ns - time.step_start_ns).sum())
    parts_ns["rest"] = np.int64(total_ns - sum(int(value) for value in parts_ns.values()))
    return Breakdown(**{part: int(parts_ns[part]) / steps / NS_A_MS for part in PARTS})


def mean_breakdown(breakdowns: list[Breakdown]) -> Breakdown:
    """The mean over ranks."""
    return Breakdown(
        **{part: sum(getattr(parts, part) for parts in breakdowns) / len(breakdowns) for part in PARTS}
    )


def overlap_percent(times: list[RankTime]) -> float:
    """The share of all ranks' communication that overlaps with computation, in percent; 0 without communication."""
    hidden = total = 0
    for time in times:
        computing = intervals.join(time.forward, time.backward, time.optimizer)
        total += int(time.per_step(time.communicating).sum())
        hidden += int(time.per_step(intervals.intersect(time.communicating, computing)).sum())
    return 100.0 * hidden / total if total else 0.0
