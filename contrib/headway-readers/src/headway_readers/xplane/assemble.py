"""One rank's events, of what was computed, what was waited for, and what was communicated."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from headway import intervals
from headway.arrays import Flags, Ints, Texts
from headway.ext import Events, Kind, Stream, texts
from headway.intervals import Spans
from headway_readers.xplane.steps import Steps

STEPS_APART = 1 << 20  # collectives of one group in one step, at most
LONGEST_NAME = 80


@dataclass(frozen=True, eq=False)
class Work:
    """What was computed, a row an operation. ``step`` is a step's place, -1 outside of all."""

    kind: Texts
    name: Texts
    step: Ints
    start_ns: Ints
    end_ns: Ints


@dataclass(frozen=True, eq=False)
class Collectives:
    """What was communicated, a row a collective; ``sequence`` is -1 where it is to be counted."""

    name: Texts
    group: Texts
    sequence: Ints
    size_bytes: Ints
    step: Ints
    enqueue_ns: Ints
    start_ns: Ints
    end_ns: Ints
    algorithm: Texts

    def __len__(self) -> int:
        return len(self.start_ns)

    def where(self, mask: Flags | Ints) -> Collectives:
        """The rows that ``mask`` (or an array of places) picks."""
        return Collectives(**{field.name: getattr(self, field.name)[mask] for field in fields(self)})


def assemble(steps: Steps, work: Work, collectives: Collectives, reading: Spans) -> Events:
    """A rank's events. ``reading`` is when it waited for input, whatever it computed meanwhile."""
    inside = work.step >= 0
    own = collectives.where(collectives.step >= 0)
    own = own.where(np.argsort(own.enqueue_ns, kind="stable"))
    computing = intervals.union(work.start_ns, work.end_ns)
    waiting = intervals.subtract(intervals.union(own.enqueue_ns, own.end_ns), computing)
    parts = [
        Events.from_columns(
            kind=Kind.STEP,
            stream=Stream.COMPUTE,
            name=texts([f"step {number}" for number in steps.number.tolist()]),
            step=steps.number,
            start_ns=steps.start_ns,
            duration_ns=steps.end_ns - steps.start_ns,
        ),
        Events.from_columns(
            kind=work.kind[inside],
            stream=Stream.COMPUTE,
            name=work.name[inside],
            step=steps.number[work.step[inside]],
            start_ns=work.start_ns[inside],
            duration_ns=(work.end_ns - work.start_ns)[inside],
        ),
        _of_steps(steps, Kind.WAIT, waiting, own),
        _of_steps(steps, Kind.INPUT, intervals.subtract(reading, computing), None),
        Events.from_columns(
            kind=Kind.COLLECTIVE,
            stream=Stream.COMMUNICATION,
            name=own.name,
            group=own.group,
            sequence=_counted(steps, own),
            size_bytes=own.size_bytes,
            step=steps.number[own.step],
            enqueue_ns=own.enqueue_ns,
            start_ns=own.start_ns,
            duration_ns=own.end_ns - own.start_ns,
            algorithm=own.algorithm,
        ),
    ]
    return Events.concatenated(parts)


def _counted(steps: Steps, own: Collectives) -> Ints:
    """Sequences that are not given are counted from 0 in each step: ranks need not have begun to record together."""
    counted: dict[tuple[int, str, str], int] = {}
    sequences = []
    for sequence, step, group, name in zip(
        own.sequence.tolist(), own.step.tolist(), own.group.tolist(), own.name.tolist(), strict=True
    ):
        if sequence < 0:
            place = counted.get((step, group, name), 0)
            counted[step, group, name] = place + 1
            sequence = int(steps.number[step]) * STEPS_APART + place
        sequences.append(sequence)
    return np.array(sequences, dtype=np.int64)


def _of_steps(steps: Steps, kind: str, spans: Spans, named: Collectives | None) -> Events:
    """Spans of the computing stream as events, cut where steps begin and end."""
    step, start, end = _cut(steps, spans)
    name: Texts | str = "next element" if kind == Kind.INPUT else ""
    if named is not None and len(named):
        latest = np.searchsorted(named.enqueue_ns, start, side="right") - 1
        name = named.name[np.maximum(latest, 0)]
    return Events.from_columns(
        kind=kind,
        stream=Stream.COMPUTE,
        name=name,
        step=steps.number[step],
        start_ns=start,
        duration_ns=end - start,
    )


def _cut(steps: Steps, spans: Spans) -> tuple[Ints, Ints, Ints]:
    """The pieces of ``spans`` that lie in steps: the step's place, start and end."""
    first = np.searchsorted(steps.end_ns, spans[:, 0], side="right")
    last = np.searchsorted(steps.start_ns, spans[:, 1], side="left")
    pieces = np.maximum(last - first, 0)
    which = np.repeat(np.arange(len(spans)), pieces)
    before = np.concatenate([[0], np.cumsum(pieces)])[which]
    step = first[which] + np.arange(len(which)) - before
    start = np.maximum(spans[which, 0], steps.start_ns[step])
    end = np.minimum(spans[which, 1], steps.end_ns[step])
    some = end > start
    return step[some], start[some], end[some]
