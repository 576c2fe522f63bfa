"""Late launches: gradients that set out long after they were ready, although nothing kept them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway import intervals
from headway.diagnose.communication import Communications
from headway.diagnose.findings import Finding, milliseconds, of_each_step
from headway.diagnose.timeline import RankTime
from headway.trace.events import Kind
from headway.trace.format import Trace
from headway.units import format_bytes

STANDS_OUT = 0.05  # of the step
MOST_GRADIENTS = 0.5  # of the model's bytes: from here on, what is reduced after backward are the gradients
_REDUCING = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class LateLaunch:
    """Gradients reduced after backward: how many collectives a step, and how long they had been ready on average."""

    collectives: float
    size_bytes: float
    ready_ms: float | None  # where that is recorded
    waited_ms: float  # a step, until they had arrived
    cost_ms: float  # what of that backward could have hidden


def find_late_launch(trace: Trace, times: dict[int, RankTime], rows: Communications) -> LateLaunch | None:
    """Find gradients that are reduced only when backward is over. Needs a recorded model."""
    whole = sum(parameter.size_bytes for parameter in trace.model.parameters)
    if not whole:
        return None
    counts, sizes, ready_ns, waited_ns, hideable_ns = [], [], [], [], []
    for rank, time in times.items():
        events = trace.events[rank]
        passes, ready = events.of_kind(Kind.BACKWARD_PASS), events.of_kind(Kind.GRADIENT_READY)
        own = rows.where((rows.rank == rank) & (rows.bucket < 0) & np.isin(rows.name.astype(str), _REDUCING))
        for start, end, backward_ns in zip(
            time.step_start_ns.tolist(),
            time.step_end_ns.tolist(),
            time.per_step(time.backward).tolist(),
            strict=True,
        ):
            ends = passes.end_ns[(passes.start_ns >= start) & (passes.end_ns <= end)]
            here = (
                (own.enqueue_ns >= start) & (own.end_ns <= end) & (own.enqueue_ns >= ends.max(initial=start))
            )
            if not len(ends) or own.size_bytes[here].sum() < MOST_GRADIENTS * whole:
                continue
            span = intervals.union(own.arrival_ns[here], own.end_ns[here])
            waited = intervals.length_ns(intervals.intersect(time.exposed, span))
            moments = ready.start_ns[(ready.start_ns >= start) & (ready.start_ns <= end)]
            counts.append(int(here.sum()))
            sizes.append(int(own.size_bytes[here].sum()))
            if len(moments):
                ready_ns.append(float(own.enqueue_ns[here].mean() - moments.mean()))
            waited_ns.append(waited)
            hideable_ns.append(min(waited, backward_ns))
    steps = sum(len(time.step_start_ns) for time in times.values())
    if len(counts) < 0.5 * steps:
        return None
    return LateLaunch(
        collectives=float(np.mean(counts)),
        size_bytes=float(np.mean(sizes)),
        ready_ms=float(np.mean(ready_ns)) / 1e6 if ready_ns else None,
        waited_ms=float(np.sum(waited_ns)) / steps / 1e6,
        cost_ms=float(np.sum(hideable_ns)) / steps / 1e6,
    )


def launch_finding(late: LateLaunch, step_ms: float) -> Finding:
    """A late launch in words."""
    many = f"{late.collectives:.0f} collectives" if late.collectives > 1.5 else "one collective"
    ready = "" if late.ready_ms is None else f" {milliseconds(late.ready_ms)} after they were ready,"
    sentence = (
        f"Gradients are launched late: {format_bytes(late.size_bytes)} in {many} set out only when backward is over,"
        f"{ready} which costs {of_each_step(late.cost_ms, step_ms)}; start each "
        "as soon as it is ready, as DistributedDataParallel does."
    )
    return Finding("late_launch", late.cost_ms, sentence, (), late.cost_ms >= STANDS_OUT * step_ms)
