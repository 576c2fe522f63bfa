"""A rank of a Kineto document: its time is its device's kernels', or its host's main thread's."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headway import intervals
from headway.arrays import Flags, Indices, Ints, Texts
from headway.interop.readers.kineto.collectives import (
    Asked,
    Backward,
    Collectives,
    bucket_numbers,
    collective_events,
    device_collectives,
    host_collectives,
    is_communication,
)
from headway.interop.readers.kineto.companions import Known
from headway.interop.readers.kineto.document import DEVICE, LAUNCHES, KinetoDocument
from headway.interop.readers.kineto.steps import (
    BACKWARD,
    INPUT,
    OPTIMIZER,
    Steps,
    input_spans,
    named,
    of_moments,
)
from headway.trace.events import Events, Idle, Kind, Stream, texts


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
        for own in (named(document, name) for name in (BACKWARD, OPTIMIZER, INPUT))
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


LOST, LEAST_LAUNCHES = 0.1, 10  # of a step's launches, without kernels: it is not whole
_OVERLAP_NS = 2_000  # by which kernels of one stream may overlap, as clocks are read
_LEAST_IDLE_NS = 5_000  # what lies between kernels that were queued is no idleness
_BLOCKING = ("Synchronize", "StreamWaitValue")
_COPIES = ("cudaMemcpy", "hipMemcpy")  # without Async they return when the copy is done


# A rank whose computation runs on a device: its time is the kernels', not the host's.
#
# A kernel belongs to the step, and to forward, backward or optimizer, in which it was launched.


def device_events(document: KinetoDocument, steps: Steps, known: Known) -> tuple[Events, list[str]]:
    """The events of a rank with a device; and what has to be said of them."""
    kernels = document.of_category(*DEVICE)
    launches = _launches(document, kernels)
    step = _steps(document, kernels, launches, steps)
    inside = step >= 0  # what was launched before the first step belongs to none
    asked = Asked(document)
    communicating = is_communication(document, kernels, launches, asked)
    phase = of_moments(document, launches)
    stretch_of, start_ns, end_ns = _stretches(document, kernels, step, inside, communicating)
    computing = inside & ~communicating
    own = kernels[computing]
    lost = _lost_steps(document, steps, launches)
    whole_steps = ~np.isin(stretch_of, list(lost))
    parts = [
        steps.rows(stretch_of[whole_steps], start_ns[whole_steps], end_ns[whole_steps]),
        Events.from_columns(
            kind=phase[computing], name=document.name[own], stream=Stream.COMPUTE,
            step=steps.number[step[computing]], start_ns=document.start_ns[own], duration_ns=document.duration_ns[own],
        ),
    ]  # fmt: skip
    communicating &= inside
    found, begins = device_collectives(
        document, kernels[communicating], launches[communicating], known, asked
    )
    in_step, in_phase = step[communicating][begins], phase[communicating][begins]
    busy = intervals.union(document.start_ns[own], document.end_ns[own])
    last_ns = np.full(len(steps.number), -1, dtype=np.int64)
    backward = phase[computing] == Kind.BACKWARD
    np.maximum.at(last_ns, step[computing][backward], document.start_ns[own[backward]])
    bucket = bucket_numbers(document, found, in_step, in_phase, Backward(busy, last_ns[in_step]))
    parts.append(collective_events(document, found, steps, in_step, bucket))
    parts.append(_gradients_ready(document, found, own, launches[computing], bucket, steps.number[in_step]))
    exposed = _exposed(document, kernels[communicating], busy)
    parts.append(_spans(Kind.WAIT, exposed, steps.number[stretch_of], start_ns, end_ns))
    reading = intervals.subtract(input_spans(document), intervals.join(busy, exposed))
    parts.append(_spans(Kind.INPUT, reading, steps.number[stretch_of], start_ns, end_ns))
    whole = intervals.union(start_ns, end_ns)
    gaps = intervals.subtract(whole, intervals.join(busy, exposed, reading))
    parts.append(_idle(document, gaps[_long_enough(gaps)], steps.number[stretch_of], start_ns))
    notes = found.notes()
    notes += [
        f"Step {steps.number[at]} is left out: {share:.0%} of what was launched in it is not recorded, as profilers "
        "lose what does not fit their buffers."
        for at, share in sorted(lost.items())
    ]
    if overlapping := _overlapping(document, kernels[communicating]):
        notes.append(
            f"{overlapping} kernels of communication overlap others on their own stream, which no device does: times "
            "of this recording are in doubt."
        )
    return Events.concatenated(parts), notes


def _lost_steps(document: KinetoDocument, steps: Steps, launches: Indices) -> dict[int, float]:
    """Steps, by their places, of whose launches many have no kernel, where other steps have all of theirs."""
    calls = document.of_category(*LAUNCHES)
    calls = calls[document.called(calls, lambda name: "LaunchKernel" in name)]
    of_step = steps.of(document.start_ns[calls])
    count = len(steps.number)
    asked = np.bincount(of_step[of_step >= 0], minlength=count)
    missing = ~np.isin(calls, launches) & (of_step >= 0)
    share = np.bincount(of_step[missing], minlength=count) / np.maximum(asked, 1)
    lossy = np.flatnonzero((share > LOST) & (asked >= LEAST_LAUNCHES))
    if not len(lossy) or np.median(share) > LOST / 2:
        return {}
    return {int(at): float(share[at]) for at in lossy}


def _overlapping(document: KinetoDocument, communication: Indices) -> int:
    """How many kernels of communication begin before another one on their stream has ended."""
    streams = document.threads(communication)
    found = 0
    for stream in np.unique(streams).tolist():
        own = communication[streams == stream]
        reach_ns = np.maximum.accumulate(document.end_ns[own])
        found += int((document.start_ns[own][1:] + _OVERLAP_NS < reach_ns[:-1]).sum())
    return found


def _gradients_ready(
    document: KinetoDocument,
    found: Collectives,
    computing: Indices,
    launches: Indices,
    bucket: Ints,
    number: Ints,
) -> Events:
    """When the computation was done that each bucket waited for: all that had been launched when its collective was.

    The collective itself may begin later, behind the one before it.
    """
    asked = found.asked != found.index  # otherwise nothing tells when it was launched
    launched = launches >= 0
    order = np.argsort(document.start_ns[launches[launched]], kind="stable")
    launch_ns = document.start_ns[launches[launched]][order]
    done_ns = np.maximum.accumulate(document.end_ns[computing[launched]][order])
    before = np.searchsorted(launch_ns, document.start_ns[found.asked]) - 1
    told = asked & (bucket >= 0) & (before >= 0)
    ready_ns = np.minimum(done_ns[before[told]], document.start_ns[found.index[told]])
    return Events.from_columns(
        kind=Kind.GRADIENT_READY, stream=Stream.COMPUTE, name=texts([f"bucket {one}" for one in bucket[told].tolist()]),
        step=number[told], start_ns=ready_ns, bucket=bucket[told],
    )  # fmt: skip


def _idle(document: KinetoDocument, gaps: intervals.Spans, number: Ints, start_ns: Ints) -> Events:
    """Events for the stretches in which the device has nothing to do."""
    step = number[np.searchsorted(start_ns, gaps[:, 0], side="right") - 1] if len(number) else gaps[:, 0]
    return Events.from_columns(
        kind=Kind.IDLE, stream=Stream.COMPUTE, name=_idle_reasons(document, gaps), step=step,
        start_ns=gaps[:, 0], duration_ns=gaps[:, 1] - gaps[:, 0],
    )  # fmt: skip


def _steps(document: KinetoDocument, kernels: Indices, launches: Indices, steps: Steps) -> Indices:
    """The step (its index) of each kernel: that of its launch.

    A kernel whose launch is not recorded was launched before recording began, or else its record was lost: it is at
    the step of the kernel before it, as a device works in the order of launches.
    """
    if not (launches >= 0).any():
        return steps.of(document.start_ns[kernels])
    known = steps.of(document.start_ns[launches])
    before = np.maximum.accumulate(np.where(launches >= 0, np.arange(len(kernels)), -1))
    found: Indices = np.where(before >= 0, known[before], -1)
    return found


def _launches(document: KinetoDocument, kernels: Indices) -> Indices:
    """The runtime call that launched each kernel, or -1."""
    calls = document.of_category(*LAUNCHES)
    by_correlation = dict(zip(document.correlations(calls), calls.tolist(), strict=True))
    by_correlation.pop(-1, None)
    found = [by_correlation.get(correlation, -1) for correlation in document.correlations(kernels)]
    return np.array(found, dtype=np.intp)


def _stretches(
    document: KinetoDocument,
    kernels: Indices,
    step: Indices,
    inside: npt.NDArray[np.bool_],
    communicating: npt.NDArray[np.bool_],
) -> tuple[Ints, Ints, Ints]:
    """When the device was at each step: indices of steps, starts and ends.

    From a step's first kernel to the next step's first; the last ends with its last kernel. Communication does not
    count: it may start on a stream of its own while the device is still at the step before.
    """
    counted = inside & ~communicating
    counted = counted if counted.any() else inside
    if not counted.any():
        nothing = np.zeros(0, dtype=np.int64)
        return nothing, nothing, nothing
    of_step, starts = step[counted], document.start_ns[kernels[counted]]
    indices = np.unique(of_step)
    firsts = np.full(int(indices[-1]) + 1, np.iinfo(np.int64).max)
    np.minimum.at(firsts, of_step, starts)
    order = indices[np.argsort(firsts[indices], kind="stable")]
    begin = firsts[order]
    last = document.end_ns[kernels[inside]].max()
    end = np.append(begin[1:], max(int(last), int(begin[-1])))
    some = end > begin
    return order[some].astype(np.int64), begin[some], end[some]


def _exposed(document: KinetoDocument, communication: Indices, busy: intervals.Spans) -> intervals.Spans:
    """Communication that no computation hides."""
    spans = intervals.union(document.start_ns[communication], document.end_ns[communication])
    return intervals.subtract(spans, busy)


def _spans(kind: str, spans: intervals.Spans, number: Ints, start_ns: Ints, end_ns: Ints) -> Events:
    """Events of the compute stream, cut where steps end."""
    parts = []
    for one, start, end in zip(number.tolist(), start_ns.tolist(), end_ns.tolist(), strict=True):
        within = intervals.intersect(spans, np.array([[start, end]], dtype=np.int64))
        parts.append((within, np.full(len(within), one, dtype=np.int64)))
    cut = np.concatenate([within for within, _ in parts]) if parts else intervals.EMPTY
    steps = np.concatenate([numbers for _, numbers in parts]) if parts else np.zeros(0, dtype=np.int64)
    names: Texts = np.full(len(cut), "communication" if kind == Kind.WAIT else "data loader", dtype=object)
    return Events.from_columns(
        kind=kind,
        stream=Stream.COMPUTE,
        name=names,
        step=steps,
        start_ns=cut[:, 0],
        duration_ns=cut[:, 1] - cut[:, 0],
    )


def _idle_reasons(document: KinetoDocument, gaps: intervals.Spans) -> Texts:
    """For each gap of the device: synchronising where the host was waiting for the device as it began, else launching.

    A host that has waited launches the next kernel only then, and the device stands still meanwhile.
    """
    calls = document.of_category(*LAUNCHES)
    blocking = calls[document.called(calls, _blocks)]
    waiting = intervals.union(document.start_ns[blocking], document.end_ns[blocking])
    reasons = np.full(len(gaps), Idle.LAUNCHING, dtype=object)
    reasons[intervals.inside(waiting, gaps[:, 0])] = Idle.SYNCHRONISING
    return reasons


def _long_enough(gaps: intervals.Spans) -> Flags:
    """Which gaps are idleness."""
    long: Flags = gaps[:, 1] - gaps[:, 0] >= _LEAST_IDLE_NS
    return long


def _blocks(name: str) -> bool:
    return any(part in name for part in _BLOCKING) or name in _COPIES
