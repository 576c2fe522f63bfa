"""Why communication is exposed: what the gradients' buckets look like, and when they start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headway import intervals
from headway.arrays import Flags, Ints
from headway.diagnosis.communication import Communications
from headway.diagnosis.links import sent_volumes
from headway.diagnosis.timeline import RankTime
from headway.trace.events import Events, Kind

NEAR_NS = 20_000  # by which a kernel may seem to begin before the one that it waits for has ended


@dataclass(frozen=True, slots=True)
class CommunicationShape:
    """How one step communicates, averaged over ranks and steps."""

    collectives: float  # a step and rank
    mean_bytes: float
    buckets: int
    gradient_bytes: int  # the sum of the buckets' sizes
    largest_bytes: int
    # How much of backward was computed when a bucket was ready to start, from 0 to 1; None where that is unknown:
    largest_ready: float | None
    first_ready: float | None
    last_ready: float | None
    last_bytes: int  # of the bucket that was ready last
    busy_ms: float  # communication with all members there, a step
    volume_ms: float  # what the gradients' bytes alone take of it, at the best rate that large buckets reach
    backward_ms: float
    hiding_ms: float  # backward and forward: all computation that gradients could hide under
    blocking_ms: float  # exposed communication that carries no bucket of gradients, a step
    blocking_name: str  # of those the one that is waited for longest
    blocking_kinds: int  # how many names they have
    blocking_count: float  # a step
    blocking_bytes: float  # of those on average
    of_layers: float  # the share of ``blocking_ms`` that lies between the layers of forward and backward
    layers: float  # between how many pairs of layers, a step
    sharded: bool = False  # parameters are gathered and gradients scattered a layer at a time, by fully_shard
    blocks: bool = False  # every call of this backend blocks its thread


def communication_shape(
    times: dict[int, RankTime],
    rows: Communications,
    events: dict[int, Events],
    *,
    sharded: bool = False,
    blocks: bool = False,
) -> CommunicationShape:
    """Measure how the steps communicate. ``sharded`` and ``blocks`` are what the recording says itself."""
    steps = sum(len(time.step_start_ns) for time in times.values())
    within = np.zeros(len(rows), dtype=bool)
    ready = np.full(len(rows), np.nan)
    for rank, time in times.items():
        own = np.flatnonzero(rows.rank == rank)
        windows = intervals.union(time.step_start_ns, time.step_end_ns)
        within[own] = intervals.inside(windows, rows.end_ns[own] - 1)
        ready[own] = _computed_share(time, events[rank], _ready_ns(events[rank], rows.where(own)))
    counted = within & (rows.kind == Kind.COLLECTIVE) & (rows.size_bytes > 0)
    carrying = counted & (rows.bucket >= 0)
    sizes: dict[int, int] = {}
    for bucket, size in zip(rows.bucket[carrying].tolist(), rows.size_bytes[carrying].tolist(), strict=True):
        sizes[bucket] = max(sizes.get(bucket, 0), size)
    largest = max(sizes, key=lambda bucket: sizes[bucket], default=-1)
    shares = {
        bucket: share
        for bucket in sizes
        if (share := _mean(ready[carrying & (rows.bucket == bucket)])) is not None
    }
    last = max(shares, key=lambda bucket: (shares[bucket], bucket), default=-1)
    blocking = _blocking_calls(times, rows, steps)
    return CommunicationShape(
        collectives=float(counted.sum()) / steps,
        mean_bytes=float(rows.size_bytes[counted].mean()) if counted.any() else 0.0,
        buckets=len(sizes),
        gradient_bytes=sum(sizes.values()),
        largest_bytes=sizes.get(largest, 0),
        largest_ready=shares.get(largest),
        first_ready=min(shares.values(), default=None),
        last_ready=shares.get(last),
        last_bytes=sizes.get(last, 0),
        busy_ms=sum(int(time.per_step(time.communicating).sum()) for time in times.values()) / steps / 1e6,
        volume_ms=_volume_ns(times, rows, carrying) / steps / 1e6,
        backward_ms=_computed_ns(times, "backward") / steps / 1e6,
        hiding_ms=(_computed_ns(times, "backward") + _computed_ns(times, "forward")) / steps / 1e6,
        blocking_ms=blocking.total_ms,
        blocking_name=max(blocking.of_name, key=lambda name: blocking.of_name[name], default=""),
        blocking_kinds=len(blocking.of_name),
        blocking_count=blocking.a_step,
        blocking_bytes=blocking.mean_bytes,
        of_layers=blocking.of_layers,
        layers=blocking.layers,
        sharded=sharded or _is_sharded(times, rows),
        blocks=blocks,
    )


def _computed_ns(times: dict[int, RankTime], part: str) -> int:
    return sum(int(time.per_step(getattr(time, part)).sum()) for time in times.values())


def _volume_ns(times: dict[int, RankTime], rows: Communications, carrying: np.ndarray) -> float:
    """What the bytes of the rows in ``carrying`` alone take of the time in which they are in flight, over all ranks.

    The rate is what the best of the large ones reach, those that queue behind no other: what small ones take beyond it
    is latency. Several that are in flight at once reach less each, but take no longer than they are seen to.
    """
    length_ns = (rows.end_ns - np.maximum(rows.arrival_ns, rows.start_ns)).astype(np.float64)
    sent = sent_volumes(rows)
    large = carrying & (length_ns > 0) & (sent > 0)
    large &= sent >= 0.5 * sent[large].max(initial=0.0)
    if not large.any():
        return 0.0
    bytes_a_ns = float(np.quantile(sent[large] / length_ns[large], 0.9))
    busy_ns = 0
    for rank, time in times.items():
        own = carrying & (rows.rank == rank)
        busy_ns += int(time.per_step(intervals.union(rows.arrival_ns[own], rows.end_ns[own])).sum())
    return min(float(busy_ns), float(sent[carrying].sum()) / bytes_a_ns)


def _ready_ns(events: Events, own: Communications) -> Ints:
    """When each of a rank's rows could start: when its gradients were computed where that is told, else as asked for.

    A device's kernel begins later than its bucket is ready where it queues behind another.
    """
    told = events.of_kind(Kind.GRADIENT_READY)
    told = told.where(told.bucket >= 0)
    keys = zip(told.step.tolist(), told.bucket.tolist(), told.start_ns.tolist(), strict=True)
    ready_ns = {(step, bucket): moment for step, bucket, moment in keys}
    asked = zip(own.step.tolist(), own.bucket.tolist(), own.enqueue_ns.tolist(), strict=True)
    return np.array(
        [ready_ns.get((step, bucket), asked_ns) for step, bucket, asked_ns in asked], dtype=np.int64
    )


def _computed_share(time: RankTime, events: Events, moments: Ints) -> np.ndarray:
    """How much of its backward pass this rank had computed at each moment; NaN outside of every pass."""
    shares = np.full(len(moments), np.nan)
    start_ns, end_ns = _passes(time, events)
    if not len(start_ns):
        return shares
    index = np.searchsorted(start_ns, moments, side="right") - 1
    inside = (index >= 0) & (moments <= end_ns[np.maximum(index, 0)])
    chosen = index[inside]
    done = intervals.length_within(time.backward, start_ns[chosen], moments[inside])
    whole = intervals.length_within(time.backward, start_ns[chosen], end_ns[chosen])
    shares[inside] = np.where(whole > 0, done / np.maximum(whole, 1), np.nan)
    return shares


def _passes(time: RankTime, events: Events) -> tuple[Ints, Ints]:
    """When each backward pass began and ended.

    Other tools record computation only. A pass then is the backward computation between two stretches of forward, or
    two steps, and lasts until the next of these begins.
    """
    passes = events.of_kind(Kind.BACKWARD_PASS)
    if len(passes):
        return passes.start_ns, passes.end_ns
    begins = time.backward[:, 0]
    if not len(begins):
        return begins, begins
    bounds = np.sort(np.concatenate([time.forward[:, 0], time.step_start_ns, time.step_end_ns]))
    stretch = np.searchsorted(bounds, begins, side="right")
    first = np.flatnonzero(np.diff(stretch, prepend=-1))
    until = np.append(bounds, time.backward[-1:, 1])[stretch[first]]
    return begins[first], np.maximum(until, time.backward[np.append(first[1:], len(begins)) - 1, 1])


class _Blocking(NamedTuple):
    """What was waited for outside of the gradients: a step in ms, by name in ns over all steps, how many a step."""

    total_ms: float
    of_name: dict[str, int]
    a_step: float
    mean_bytes: float
    of_layers: float
    layers: float


def _blocking_calls(times: dict[int, RankTime], rows: Communications, steps: int) -> _Blocking:
    total_ns = count = layers = layers_ns = waited_ns = size_bytes = 0
    of_name: dict[str, int] = {}
    for rank, time in times.items():
        of_rank = rows.where(rows.rank == rank)
        begin_ns, is_blocking = _turns_ns(of_rank), of_rank.bucket < 0
        own, begin_ns = of_rank.where(is_blocking), begin_ns[is_blocking]
        spans = intervals.union(begin_ns, own.end_ns)
        exposed = intervals.intersect(time.exposed, intervals.union(time.step_start_ns, time.step_end_ns))
        total_ns += intervals.length_ns(intervals.intersect(exposed, spans))
        waited = intervals.length_within(exposed, begin_ns, own.end_ns)
        count += int(np.count_nonzero(waited))
        size_bytes += int(own.size_bytes[waited > 0].sum())
        waited_ns += int(waited.sum())
        between = _between_layers(time, own) & (waited > 0)
        layers_ns += int(waited[between].sum())
        computing = intervals.join(time.forward, time.backward)
        layers += len(np.unique(np.searchsorted(computing[:, 0], own.arrival_ns[between])))
        for name, one_ns in zip(own.name.tolist(), waited.tolist(), strict=True):
            if one_ns:
                of_name[name] = of_name.get(name, 0) + one_ns
    return _Blocking(
        total_ns / steps / 1e6, of_name, count / steps, size_bytes / max(count, 1),
        layers_ns / max(waited_ns, 1), layers / steps,
    )  # fmt: skip


def _turns_ns(own: Communications) -> Ints:
    """When a rank's rows could be carried out: once they were called, and the calls before them in their group done.

    DDP's small all-reduce of unused parameters is called behind its buckets, and waits for them.
    """
    turns_ns = own.arrival_ns.copy()
    for group in dict.fromkeys(own.group.tolist()):
        of_group = np.flatnonzero(own.group == group)
        order = of_group[np.lexsort((own.sequence[of_group], own.arrival_ns[of_group]))]
        before_ns = np.maximum.accumulate(own.end_ns[order])[:-1]
        turns_ns[order[1:]] = np.clip(before_ns, own.arrival_ns[order[1:]], own.end_ns[order[1:]])
    return turns_ns


def _between_layers(time: RankTime, own: Communications) -> Flags:
    """Which of a rank's rows lie inside of a step's forward and backward: these compute before and after them."""
    before, after = _pass_at(time, own.arrival_ns, before=True), _pass_at(time, own.end_ns, before=False)
    step = np.searchsorted(time.step_start_ns, own.arrival_ns, side="right")
    inside: Flags = step == np.searchsorted(time.step_start_ns, own.end_ns, side="right")
    return inside & (before >= 0) & (before <= after)


def _pass_at(time: RankTime, moments: Ints, *, before: bool) -> Ints:
    """0 for forward and 1 for backward, by what was computed last before each moment or first after it; else -1."""
    borders = 1 if before else 0
    ends = np.concatenate([time.forward[:, borders], time.backward[:, borders]])
    kind = np.repeat([0, 1], [len(time.forward), len(time.backward)])
    order = np.argsort(ends, kind="stable")
    ends, kind = ends[order], kind[order]
    if not len(ends):
        return np.full(len(moments), -1, dtype=np.int64)
    place = (
        np.searchsorted(ends, moments + NEAR_NS, side="right") - 1
        if before
        else np.searchsorted(ends, moments - NEAR_NS)
    )
    known = (place >= 0) & (place < len(ends))
    return np.where(known, kind[np.clip(place, 0, len(ends) - 1)], -1)


def _is_sharded(times: dict[int, RankTime], rows: Communications) -> bool:
    """Whether a group gathers several times in forward and scatters several times in backward, and only there.

    So do FSDP and ZeRO. Sequence parallelism scatters in forward, too.
    """
    for rank, time in times.items():
        own = rows.where(rows.rank == rank)
        at = _pass_at(time, own.arrival_ns, before=True)
        at[at < 0] = 0
        for group in dict.fromkeys(own.group.tolist()):
            here = own.group == group
            gathers = (own.name == "all_gather") & here
            scatters = (own.name == "reduce_scatter") & here
            least = 2 * len(time.step_start_ns)
            in_forward = int((scatters & (at == 0)).sum())
            if gathers.sum() >= least and scatters.sum() >= least and 4 * in_forward <= scatters.sum():
                return True
        break
    return False


def _mean(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
