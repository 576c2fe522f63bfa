"""Converts a rank of a Kineto document to events, timed by its device's kernels or by the host's main thread.

With a device, a kernel belongs to the step and phase (forward, backward, optimizer) in which it was launched.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headway import intervals
from headway.arrays import Flags, Indices, Ints, Texts
from headway.interop.readers.kineto.collectives import (
    Backward,
    Collectives,
    EnclosingCalls,
    bucket_numbers,
    collective_events,
    device_collectives,
    host_collectives,
    is_communication,
)
from headway.interop.readers.kineto.companions import RankCompanions
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


def host_events(
    document: KinetoDocument, steps: Steps, companions: RankCompanions
) -> tuple[Events, list[str]]:
    """The events of a rank without a device, and notes about them."""
    operators = document.of_category("cpu_op", "Operator")
    operators = operators[document.threads(operators) == steps.main_thread]
    operators = operators[
        ~document.called(operators, lambda name: name.startswith(("c10d::", "gloo:", "record_")))
    ]
    computing = _outermost(document, operators)
    backward, optimizer, reading = (
        indices[document.threads(indices) == steps.main_thread]
        for indices in (named(document, name) for name in (BACKWARD, OPTIMIZER, INPUT))
    )
    collectives = host_collectives(document, companions)
    step = steps.of(document.start_ns[collectives.index])
    inside = step >= 0
    in_backward = intervals.union(document.start_ns[backward], document.end_ns[backward])
    asked_ns = document.start_ns[collectives.caller]
    phase = np.where(intervals.inside(in_backward, asked_ns), Kind.BACKWARD, Kind.FORWARD).astype(object)
    parts = [steps.rows(np.arange(len(steps.number)), steps.start_ns, steps.end_ns)]
    covered = np.concatenate([backward, optimizer, reading])
    held = intervals.union(document.start_ns[covered], document.end_ns[covered])
    forward = computing[~intervals.inside(held, document.start_ns[computing])]
    parts += [
        _rows(document, indices, kind, steps)
        for indices, kind in (
            (forward, Kind.FORWARD),
            (_outermost(document, np.sort(backward)), Kind.BACKWARD),
            (optimizer, Kind.OPTIMIZER),
            (reading, Kind.INPUT),
        )
    ]
    inner_collectives, step = collectives.where(inside), step[inside]
    bucket = bucket_numbers(document, inner_collectives, step, phase[inside])
    parts.append(collective_events(document, inner_collectives, steps, step, bucket))
    busy = intervals.join(held, intervals.union(document.start_ns[computing], document.end_ns[computing]))
    parts.append(_waits(document, collectives.index, busy, steps))
    return Events.concatenated(parts), collectives.notes()


def _rows(document: KinetoDocument, indices: Indices, kind: str, steps: Steps) -> Events:
    step = steps.of(document.start_ns[indices])
    indices, step = indices[step >= 0], step[step >= 0]
    return Events.from_columns(
        kind=kind, stream=Stream.COMPUTE, name=document.name[indices], step=steps.number[step],
        start_ns=document.start_ns[indices], duration_ns=document.duration_ns[indices],
    )  # fmt: skip


def _waits(document: KinetoDocument, communication: Indices, busy: intervals.Spans, steps: Steps) -> Events:
    """Waits: communication within steps while the main thread is idle."""
    spans = intervals.union(document.start_ns[communication], document.end_ns[communication])
    idle = intervals.subtract(spans, busy)
    windows = intervals.union(steps.start_ns, steps.end_ns)
    idle = intervals.intersect(idle, windows)
    return Events.from_columns(
        kind=Kind.WAIT, stream=Stream.COMPUTE, name="communication", step=steps.number[steps.of(idle[:, 0])],
        start_ns=idle[:, 0], duration_ns=idle[:, 1] - idle[:, 0],
    )  # fmt: skip


def _outermost(document: KinetoDocument, indices: Indices) -> Indices:
    """The events of one thread, ordered by start, that lie within no other of them."""
    if not len(indices):
        return indices
    reach = np.maximum.accumulate(document.end_ns[indices])
    first: Indices = indices[np.concatenate([[True], document.start_ns[indices[1:]] >= reach[:-1]])]
    return first


LOST, LEAST_LAUNCHES = 0.1, 10  # a step with more lost kernels than this share of its launches is incomplete
_OVERLAP_NS = 2_000  # tolerated overlap of kernels on one stream, for clock resolution
_LEAST_IDLE_NS = 5_000  # shorter gaps separate queued kernels
_BLOCKING = ("Synchronize", "StreamWaitValue")
_COPIES = ("cudaMemcpy", "hipMemcpy")  # without Async they return when the copy is done


def device_events(
    document: KinetoDocument, steps: Steps, companions: RankCompanions
) -> tuple[Events, list[str]]:
    """The events of a rank with a device, and notes about them."""
    kernels = document.of_category(*DEVICE)
    launches = _launches(document, kernels)
    step = _steps(document, kernels, launches, steps)
    inside = step >= 0  # launches before the first step belong to none
    callers = EnclosingCalls(document)
    communicating = is_communication(document, kernels, launches, callers)
    phase = of_moments(document, launches)
    stretch_of, start_ns, end_ns = _stretches(document, kernels, step, inside, communicating)
    computing = inside & ~communicating
    computing_rows = kernels[computing]
    lost = _lost_steps(document, steps, launches)
    whole_steps = ~np.isin(stretch_of, list(lost))
    parts = [
        steps.rows(stretch_of[whole_steps], start_ns[whole_steps], end_ns[whole_steps]),
        Events.from_columns(
            kind=phase[computing], name=document.name[computing_rows], stream=Stream.COMPUTE,
            step=steps.number[step[computing]], start_ns=document.start_ns[computing_rows],
            duration_ns=document.duration_ns[computing_rows],
        ),
    ]  # fmt: skip
    communicating &= inside
    collectives, begins = device_collectives(
        document, kernels[communicating], launches[communicating], companions, callers
    )
    in_step, in_phase = step[communicating][begins], phase[communicating][begins]
    busy = intervals.union(document.start_ns[computing_rows], document.end_ns[computing_rows])
    last_ns = np.full(len(steps.number), -1, dtype=np.int64)
    backward = phase[computing] == Kind.BACKWARD
    np.maximum.at(last_ns, step[computing][backward], document.start_ns[computing_rows[backward]])
    bucket = bucket_numbers(document, collectives, in_step, in_phase, Backward(busy, last_ns[in_step]))
    parts.append(collective_events(document, collectives, steps, in_step, bucket))
    parts.append(
        _gradients_ready(
            document, collectives, computing_rows, launches[computing], bucket, steps.number[in_step]
        )
    )
    exposed = _exposed(document, kernels[communicating], busy)
    parts.append(_spans(Kind.WAIT, exposed, steps.number[stretch_of], start_ns, end_ns))
    reading = intervals.subtract(input_spans(document), intervals.join(busy, exposed))
    parts.append(_spans(Kind.INPUT, reading, steps.number[stretch_of], start_ns, end_ns))
    recorded_spans = intervals.union(start_ns, end_ns)
    gaps = intervals.subtract(recorded_spans, intervals.join(busy, exposed, reading))
    parts.append(_idle(document, gaps[_long_enough(gaps)], steps.number[stretch_of], start_ns))
    notes = collectives.notes()
    notes += [
        f"Step {steps.number[at]} is left out: the profiler lost {share:.0%} of its kernels (its buffers were full)."
        for at, share in sorted(lost.items())
    ]
    if overlapping := _overlapping(document, kernels[communicating]):
        notes.append(
            f"{overlapping} communication kernels overlap others on the same stream, which is impossible: the "
            "recorded times are doubtful."
        )
    return Events.concatenated(parts), notes


def _lost_steps(document: KinetoDocument, steps: Steps, launches: Indices) -> dict[int, float]:
    """The share of lost kernels of each incomplete step, by index; empty if most steps lose some."""
    calls = document.of_category(*LAUNCHES)
    calls = calls[document.called(calls, lambda name: "LaunchKernel" in name)]
    of_step = steps.of(document.start_ns[calls])
    count = len(steps.number)
    launch_counts = np.bincount(of_step[of_step >= 0], minlength=count)
    missing = ~np.isin(calls, launches) & (of_step >= 0)
    share = np.bincount(of_step[missing], minlength=count) / np.maximum(launch_counts, 1)
    lossy = np.flatnonzero((share > LOST) & (launch_counts >= LEAST_LAUNCHES))
    if not len(lossy) or np.median(share) > LOST / 2:
        return {}
    return {int(at): float(share[at]) for at in lossy}


def _overlapping(document: KinetoDocument, communication: Indices) -> int:
    """The number of communication kernels that begin before the previous one on their stream has ended."""
    streams = document.threads(communication)
    count = 0
    for stream in np.unique(streams).tolist():
        kernels = communication[streams == stream]
        reach_ns = np.maximum.accumulate(document.end_ns[kernels])
        count += int((document.start_ns[kernels][1:] + _OVERLAP_NS < reach_ns[:-1]).sum())
    return count


def _gradients_ready(
    document: KinetoDocument,
    collectives: Collectives,
    computing: Indices,
    launches: Indices,
    bucket: Ints,
    number: Ints,
) -> Events:
    """GRADIENT_READY events: when all computation launched before each bucket's collective had finished.

    The collective itself may begin later, queued behind the previous one.
    """
    has_launch = collectives.caller != collectives.index  # otherwise its launch time is unknown
    launched = launches >= 0
    order = np.argsort(document.start_ns[launches[launched]], kind="stable")
    launch_ns = document.start_ns[launches[launched]][order]
    done_ns = np.maximum.accumulate(document.end_ns[computing[launched]][order])
    before = np.searchsorted(launch_ns, document.start_ns[collectives.caller]) - 1
    is_known = has_launch & (bucket >= 0) & (before >= 0)
    ready_ns = np.minimum(done_ns[before[is_known]], document.start_ns[collectives.index[is_known]])
    return Events.from_columns(
        kind=Kind.GRADIENT_READY, stream=Stream.COMPUTE,
        name=texts([f"bucket {index}" for index in bucket[is_known].tolist()]),
        step=number[is_known], start_ns=ready_ns, bucket=bucket[is_known],
    )  # fmt: skip


def _idle(document: KinetoDocument, gaps: intervals.Spans, number: Ints, start_ns: Ints) -> Events:
    """IDLE events for gaps in the device's work."""
    step = number[np.searchsorted(start_ns, gaps[:, 0], side="right") - 1] if len(number) else gaps[:, 0]
    return Events.from_columns(
        kind=Kind.IDLE, stream=Stream.COMPUTE, name=_idle_reasons(document, gaps), step=step,
        start_ns=gaps[:, 0], duration_ns=gaps[:, 1] - gaps[:, 0],
    )  # fmt: skip


def _steps(document: KinetoDocument, kernels: Indices, launches: Indices, steps: Steps) -> Indices:
    """The step index of each kernel's launch.

    A kernel without a recorded launch takes the step of the kernel before it, as devices work in launch order.
    """
    if not (launches >= 0).any():
        return steps.of(document.start_ns[kernels])
    launch_steps = steps.of(document.start_ns[launches])
    before = np.maximum.accumulate(np.where(launches >= 0, np.arange(len(kernels)), -1))
    kernel_steps: Indices = np.where(before >= 0, launch_steps[before], -1)
    return kernel_steps


def _launches(document: KinetoDocument, kernels: Indices) -> Indices:
    """The runtime call that launched each kernel, or -1."""
    calls = document.of_category(*LAUNCHES)
    by_correlation = dict(zip(document.correlations(calls), calls.tolist(), strict=True))
    by_correlation.pop(-1, None)
    launches = [by_correlation.get(correlation, -1) for correlation in document.correlations(kernels)]
    return np.array(launches, dtype=np.intp)


def _stretches(
    document: KinetoDocument,
    kernels: Indices,
    step: Indices,
    inside: npt.NDArray[np.bool_],
    communicating: npt.NDArray[np.bool_],
) -> tuple[Ints, Ints, Ints]:
    """When the device ran each step: indices of steps, starts and ends.

    A step lasts from its first kernel to the next step's first; the last ends with its last kernel. Communication does
    not count: on a separate stream it may start while the device still runs the step before.
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
    """Communication without overlapping computation."""
    spans = intervals.union(document.start_ns[communication], document.end_ns[communication])
    return intervals.subtract(spans, busy)


def _spans(kind: str, spans: intervals.Spans, number: Ints, start_ns: Ints, end_ns: Ints) -> Events:
    """Events of the compute stream, cut at the ends of steps."""
    parts = []
    for step_number, start, end in zip(number.tolist(), start_ns.tolist(), end_ns.tolist(), strict=True):
        within = intervals.intersect(spans, np.array([[start, end]], dtype=np.int64))
        parts.append((within, np.full(len(within), step_number, dtype=np.int64)))
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
    """The reason of each gap: synchronising if the host was waiting for the device when it began, else launching.

    After such a wait the host still has to launch the next kernel, while the device is idle.
    """
    calls = document.of_category(*LAUNCHES)
    blocking = calls[document.called(calls, _blocks)]
    waiting = intervals.union(document.start_ns[blocking], document.end_ns[blocking])
    reasons = np.full(len(gaps), Idle.LAUNCHING, dtype=object)
    reasons[intervals.inside(waiting, gaps[:, 0])] = Idle.SYNCHRONISING
    return reasons


def _long_enough(gaps: intervals.Spans) -> Flags:
    """A mask of the gaps that count as idle."""
    long: Flags = gaps[:, 1] - gaps[:, 0] >= _LEAST_IDLE_NS
    return long


def _blocks(name: str) -> bool:
    return any(part in name for part in _BLOCKING) or name in _COPIES
