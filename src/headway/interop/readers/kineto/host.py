"""A rank that computes on its host: its time is the main thread's; Gloo's threads communicate concurrently."""

from __future__ import annotations

import numpy as np

from headway import intervals
from headway.arrays import Indices
from headway.interop.readers.kineto import phases
from headway.interop.readers.kineto.collectives import bucket_numbers, collective_events, host_collectives
from headway.interop.readers.kineto.companions import Known
from headway.interop.readers.kineto.document import KinetoDocument
from headway.interop.readers.kineto.steps import Steps
from headway.trace.events import Events, Kind, Stream


def host_events(document: KinetoDocument, steps: Steps, known: Known) -> tuple[Events, list[str]]:
    """The events of a rank without a device; and what has to be said of them."""
    operators = document.of_category("cpu_op", "Operator")
    operators = operators[document.threads(operators) == steps.main_thread]
    operators = operators[
        ~document.called(operators, lambda name: name.startswith(("c10d::", "gloo:", "record_")))
    ]
    computing = _outermost(document, operators)
    backward, optimizer, reading = (
        own[document.threads(own) == steps.main_thread]
        for own in (
            phases.named(document, name) for name in (phases.BACKWARD, phases.OPTIMIZER, phases.INPUT)
        )
    )
    found = host_collectives(document, known)
    step = steps.of(document.start_ns[found.index])
    inside = step >= 0
    in_backward = intervals.union(document.start_ns[backward], document.end_ns[backward])
    asked_ns = document.start_ns[found.asked]
    phase = np.where(intervals.inside(in_backward, asked_ns), Kind.BACKWARD, Kind.FORWARD).astype(object)
    parts = [steps.rows(np.arange(len(steps.number)), steps.start_ns, steps.end_ns)]
    covered = np.concatenate([backward, optimizer, reading])
    held = intervals.union(document.start_ns[covered], document.end_ns[covered])
    forward = computing[~intervals.inside(held, document.start_ns[computing])]
    parts += [
        _rows(document, own, kind, steps)
        for own, kind in (
            (forward, Kind.FORWARD),
            (_outermost(document, np.sort(backward)), Kind.BACKWARD),
            (optimizer, Kind.OPTIMIZER),
            (reading, Kind.INPUT),
        )
    ]
    found_inside, step = found.where(inside), step[inside]
    bucket = bucket_numbers(document, found_inside, step, phase[inside])
    parts.append(collective_events(document, found_inside, steps, step, bucket))
    busy = intervals.join(held, intervals.union(document.start_ns[computing], document.end_ns[computing]))
    parts.append(_waits(document, found.index, busy, steps))
    return Events.concatenated(parts), found.notes()


def _rows(document: KinetoDocument, own: Indices, kind: str, steps: Steps) -> Events:
    step = steps.of(document.start_ns[own])
    own, step = own[step >= 0], step[step >= 0]
    return Events.from_columns(
        kind=kind, stream=Stream.COMPUTE, name=document.name[own], step=steps.number[step],
        start_ns=document.start_ns[own], duration_ns=document.duration_ns[own],
    )  # fmt: skip


def _waits(document: KinetoDocument, communication: Indices, busy: intervals.Spans, steps: Steps) -> Events:
    """Communication under which the main thread does nothing, inside of steps."""
    spans = intervals.union(document.start_ns[communication], document.end_ns[communication])
    idle = intervals.subtract(spans, busy)
    windows = intervals.union(steps.start_ns, steps.end_ns)
    idle = intervals.intersect(idle, windows)
    return Events.from_columns(
        kind=Kind.WAIT, stream=Stream.COMPUTE, name="communication", step=steps.number[steps.of(idle[:, 0])],
        start_ns=idle[:, 0], duration_ns=idle[:, 1] - idle[:, 0],
    )  # fmt: skip


def _outermost(document: KinetoDocument, indices: Indices) -> Indices:
    """Those events of one thread, in order of their start, that lie in no other of them."""
    if not len(indices):
        return indices
    reach = np.maximum.accumulate(document.end_ns[indices])
    first: Indices = indices[np.concatenate([[True], document.start_ns[indices[1:]] >= reach[:-1]])]
    return first
