"""Late launches: gradients whose reduction starts long after they were ready, although nothing prevents it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway import intervals
from headway.arrays import Floats, Ints
from headway.diagnosis.breakdown import NS_A_MS
from headway.diagnosis.communication import Communications
from headway.diagnosis.findings import Finding, milliseconds, of_each_step
from headway.diagnosis.timeline import RankTime
from headway.trace.events import Events, Kind
from headway.trace.format import Trace
from headway.units import format_bytes

LATE_LAUNCH_STANDS_OUT = 0.05  # of the step
MOST_GRADIENTS = 0.5  # of the model's bytes: from here on, what is reduced after backward are the gradients
_REDUCING = ("all_reduce", "reduce_scatter")
_NEVER = np.iinfo(np.int64).min


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
    reducing = rows.where((rows.bucket < 0) & np.isin(rows.name.astype(str), _REDUCING))
    found = [
        _late_steps(time, trace.events[rank], reducing.of_rank(rank), MOST_GRADIENTS * whole)
        for rank, time in times.items()
    ]
    counts, sizes, ready_ns, waited_ns, hideable_ns = (
        np.concatenate(column) for column in zip(*found, strict=True)
    )
    steps = sum(len(time.step_start_ns) for time in times.values())
    if not len(counts) or len(counts) < 0.5 * steps:
        return None
    known_ns = ready_ns[~np.isnan(ready_ns)]
    return LateLaunch(
        collectives=float(counts.mean()),
        size_bytes=float(sizes.mean()),
        ready_ms=float(known_ns.mean()) / NS_A_MS if len(known_ns) else None,
        waited_ms=float(waited_ns.sum()) / steps / NS_A_MS,
        cost_ms=float(hideable_ns.sum()) / steps / NS_A_MS,
    )


def _late_steps(
    time: RankTime, events: Events, own: Communications, least_bytes: float
) -> tuple[Floats, ...]:
    """One rank's steps that reduce at least ``least_bytes`` when their backward is over.

    Of each: how many collectives, their bytes, for how long the gradients had been ready (NaN where nobody knows), how
    long they were waited for, and how much of that backward could have hidden.
    """
    steps = len(time.step_start_ns)
    passes, ready = events.of_kind(Kind.BACKWARD_PASS), events.of_kind(Kind.GRADIENT_READY)
    over = np.full(steps, _NEVER)  # when backward is over
    of_pass, within = _steps_of(time, passes.start_ns, passes.end_ns)
    np.maximum.at(over, of_pass[within], passes.end_ns[within])
    of_row, within = _steps_of(time, own.enqueue_ns, own.end_ns)
    late = within & (own.enqueue_ns >= over[of_row]) & (over[of_row] > _NEVER)
    sizes = np.bincount(of_row[late], own.size_bytes[late], steps).astype(np.float64)
    told = (sizes > 0) & (sizes >= least_bytes)
    late &= told[of_row]
    spans = intervals.union(own.arrival_ns[late], own.end_ns[late])
    waited = time.per_step(intervals.intersect(time.exposed, spans)).astype(np.float64)
    of_ready, within = _steps_of(time, ready.start_ns, ready.start_ns)
    asked = _mean_since_start(time, of_row[late], own.enqueue_ns[late])
    ready_for = asked - _mean_since_start(time, of_ready[within], ready.start_ns[within])
    counts = np.bincount(of_row[late], minlength=steps).astype(np.float64)
    hideable = np.minimum(waited, time.per_step(time.backward).astype(np.float64))
    return tuple(column[told] for column in (counts, sizes, ready_for, waited, hideable))


def _steps_of(time: RankTime, starts: Ints, ends: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """The place of the step in which each span begins, and whether it lies in it as a whole."""
    steps = np.maximum(np.searchsorted(time.step_start_ns, starts, side="right") - 1, 0)
    return steps, (starts >= time.step_start_ns[steps]) & (ends <= time.step_end_ns[steps])


def _mean_since_start(time: RankTime, steps: Ints, moments: Ints) -> Floats:
    """The mean of each step's moments, counted from its start; NaN where it has none."""
    since = np.bincount(steps, moments - time.step_start_ns[steps], len(time.step_start_ns))
    count = np.bincount(steps, minlength=len(time.step_start_ns))
    return np.where(count > 0, since / np.maximum(count, 1), np.nan)


def launch_finding(late: LateLaunch, step_ms: float) -> Finding:
    """A late launch in words."""
    many = f"{late.collectives:.0f} collectives" if late.collectives > 1.5 else "one collective"
    ready = "" if late.ready_ms is None else f" {milliseconds(late.ready_ms)} after they were ready,"
    sentence = (
        f"Gradients are launched late: {format_bytes(late.size_bytes)} in {many} start only when backward is over,"
        f"{ready} which costs {of_each_step(late.cost_ms, step_ms)}; start each "
        "as soon as it is ready, as DistributedDataParallel does."
    )
    return Finding(
        "late_launch", late.cost_ms, sentence, (), late.cost_ms >= LATE_LAUNCH_STANDS_OUT * step_ms
    )
