"""Explains why communication is exposed: small, large or late gradient buckets, a slow link, or blocking calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headway import intervals
from headway.arrays import Flags, Ints
from headway.diagnosis.breakdown import NS_A_MS, Breakdown, RankTime
from headway.diagnosis.communication import Communications
from headway.diagnosis.findings import milliseconds, percent
from headway.diagnosis.links import sent_volumes
from headway.trace.events import Events, Kind
from headway.units import format_bytes

NEAR_NS = 20_000  # a kernel may be recorded as starting this long before the kernel it waits for has ended


@dataclass(frozen=True, slots=True)
class CommunicationShape:
    """How a step communicates, averaged over ranks and steps. Times are ms per step."""

    collectives: float  # per step and rank
    mean_bytes: float
    buckets: int
    gradient_bytes: int  # the sum of the buckets' sizes
    largest_bytes: int
    # The share of backward that was done when a bucket became ready, from 0 to 1; None if unknown:
    largest_ready: float | None
    first_ready: float | None
    last_ready: float | None
    last_bytes: int  # size of the bucket that became ready last
    busy_ms: float  # communication with all members present
    volume_ms: (
        float  # the part of ``busy_ms`` that the gradients' bytes need at the best rate of large buckets
    )
    backward_ms: float
    hiding_ms: float  # backward and forward: all computation that could hide gradients
    blocking_ms: float  # exposed communication outside the gradient buckets
    blocking_name: str  # the collective outside the buckets with the longest wait
    blocking_kinds: int  # number of different names
    blocking_count: float  # per step
    blocking_bytes: float  # mean size
    of_layers: float  # the share of ``blocking_ms`` between layers of forward and backward
    layers: float  # pairs of layers with communication between them, per step
    sharded: bool = False  # parameters are gathered and gradients scattered layer by layer, as by fully_shard
    blocks: bool = False  # every call of this backend blocks its thread


def communication_shape(
    times: dict[int, RankTime],
    rows: Communications,
    events: dict[int, Events],
    *,
    sharded: bool = False,
    blocks: bool = False,
) -> CommunicationShape:
    """Measures how the steps communicate. ``sharded`` and ``blocks`` come from the recording's metadata."""
    steps = sum(len(time.step_start_ns) for time in times.values())
    within = np.zeros(len(rows), dtype=bool)
    ready = np.full(len(rows), np.nan)
    for rank, time in times.items():
        of_rank = np.flatnonzero(rows.rank == rank)
        windows = intervals.union(time.step_start_ns, time.step_end_ns)
        within[of_rank] = intervals.inside(windows, rows.end_ns[of_rank] - 1)
        ready[of_rank] = _computed_share(time, events[rank], _ready_ns(events[rank], rows.where(of_rank)))
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
    """The transfer time of the rows in ``carrying`` without latency, in ns summed over ranks.

    It assumes the best rate of large collectives, which do not queue; what small ones take beyond it is latency. The
    result is limited to the time in flight, because concurrent collectives share the link.
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
        of_rank = carrying & (rows.rank == rank)
        busy_ns += int(time.per_step(intervals.union(rows.arrival_ns[of_rank], rows.end_ns[of_rank])).sum())
    return min(float(busy_ns), float(sent[carrying].sum()) / bytes_a_ns)


def _ready_ns(events: Events, rank_rows: Communications) -> Ints:
    """When each of a rank's rows could start: when its gradients were ready if recorded, else when it was enqueued.

    On devices a kernel may start later than its bucket is ready, because it queues behind another.
    """
    ready = events.of_kind(Kind.GRADIENT_READY)
    ready = ready.where(ready.bucket >= 0)
    keys = zip(ready.step.tolist(), ready.bucket.tolist(), ready.start_ns.tolist(), strict=True)
    ready_ns = {(step, bucket): moment for step, bucket, moment in keys}
    enqueued = zip(
        rank_rows.step.tolist(), rank_rows.bucket.tolist(), rank_rows.enqueue_ns.tolist(), strict=True
    )
    return np.array(
        [ready_ns.get((step, bucket), asked_ns) for step, bucket, asked_ns in enqueued], dtype=np.int64
    )


def _computed_share(time: RankTime, events: Events, moments: Ints) -> np.ndarray:
    """The share of the backward pass that was computed at each moment; NaN outside backward passes."""
    shares = np.full(len(moments), np.nan)
    start_ns, end_ns = _passes(time, events)
    if not len(start_ns):
        return shares
    index = np.searchsorted(start_ns, moments, side="right") - 1
    inside = (index >= 0) & (moments <= end_ns[np.maximum(index, 0)])
    chosen = index[inside]
    done = intervals.length_within(time.backward, start_ns[chosen], moments[inside])
    pass_ns = intervals.length_within(time.backward, start_ns[chosen], end_ns[chosen])
    shares[inside] = np.where(pass_ns > 0, done / np.maximum(pass_ns, 1), np.nan)
    return shares


def _passes(time: RankTime, events: Events) -> tuple[Ints, Ints]:
    """The start and end of each backward pass.

    Traces of other tools have no passes. There, a pass is the backward computation between two stretches of forward,
    or two steps, and lasts until the next of these begins.
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
    """Waits outside the gradient buckets: in ms per step, in ns by name over all steps, and their number per step."""

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
        blocking, begin_ns = of_rank.where(is_blocking), begin_ns[is_blocking]
        spans = intervals.union(begin_ns, blocking.end_ns)
        exposed = intervals.intersect(time.exposed, intervals.union(time.step_start_ns, time.step_end_ns))
        total_ns += intervals.length_ns(intervals.intersect(exposed, spans))
        waited = intervals.length_within(exposed, begin_ns, blocking.end_ns)
        count += int(np.count_nonzero(waited))
        size_bytes += int(blocking.size_bytes[waited > 0].sum())
        waited_ns += int(waited.sum())
        between = _between_layers(time, blocking) & (waited > 0)
        layers_ns += int(waited[between].sum())
        computing = intervals.join(time.forward, time.backward)
        layers += len(np.unique(np.searchsorted(computing[:, 0], blocking.arrival_ns[between])))
        for name, one_ns in zip(blocking.name.tolist(), waited.tolist(), strict=True):
            if one_ns:
                of_name[name] = of_name.get(name, 0) + one_ns
    return _Blocking(
        total_ns / steps / 1e6, of_name, count / steps, size_bytes / max(count, 1),
        layers_ns / max(waited_ns, 1), layers / steps,
    )  # fmt: skip


def _turns_ns(rank_rows: Communications) -> Ints:
    """When each of a rank's rows could run: after its last arrival, and after the earlier calls of its group.

    DDP's small all-reduce of unused parameters is issued after the buckets and waits for them.
    """
    turns_ns = rank_rows.arrival_ns.copy()
    for group in dict.fromkeys(rank_rows.group.tolist()):
        of_group = np.flatnonzero(rank_rows.group == group)
        order = of_group[np.lexsort((rank_rows.sequence[of_group], rank_rows.arrival_ns[of_group]))]
        before_ns = np.maximum.accumulate(rank_rows.end_ns[order])[:-1]
        turns_ns[order[1:]] = np.clip(before_ns, rank_rows.arrival_ns[order[1:]], rank_rows.end_ns[order[1:]])
    return turns_ns


def _between_layers(time: RankTime, rank_rows: Communications) -> Flags:
    """Which of a rank's rows lie within forward and backward, with computation before and after them."""
    before, after = (
        _pass_at(time, rank_rows.arrival_ns, before=True),
        _pass_at(time, rank_rows.end_ns, before=False),
    )
    step = np.searchsorted(time.step_start_ns, rank_rows.arrival_ns, side="right")
    inside: Flags = step == np.searchsorted(time.step_start_ns, rank_rows.end_ns, side="right")
    return inside & (before >= 0) & (before <= after)


def _pass_at(time: RankTime, moments: Ints, *, before: bool) -> Ints:
    """The computation last before (or first after) each moment: 0 for forward, 1 for backward, -1 for neither."""
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
    exists = (place >= 0) & (place < len(ends))
    return np.where(exists, kind[np.clip(place, 0, len(ends) - 1)], -1)


def _is_sharded(times: dict[int, RankTime], rows: Communications) -> bool:
    """Whether a group all-gathers in every step, and reduce-scatters almost only in backward, as FSDP and ZeRO do.

    Sequence parallelism also reduce-scatters in forward.
    """
    for rank, time in times.items():
        rank_rows = rows.where(rows.rank == rank)
        at = _pass_at(time, rank_rows.arrival_ns, before=True)
        at[at < 0] = 0
        for group in dict.fromkeys(rank_rows.group.tolist()):
            here = rank_rows.group == group
            gathers = (rank_rows.name == "all_gather") & here
            scatters = (rank_rows.name == "reduce_scatter") & here
            least = 2 * len(time.step_start_ns)
            in_forward = int((scatters & (at == 0)).sum())
            if gathers.sum() >= least and scatters.sum() >= least and 4 * in_forward <= scatters.sum():
                return True
        break
    return False


def _mean(values: np.ndarray) -> float | None:
    finite = values[~np.isnan(values)]
    return float(finite.mean()) if len(finite) else None


SMALL_BYTES = 256 * 1024
MANY = 16  # collectives per step
LAYERS = 2  # interruptions of computation per step from which they count as lying between layers
MOST = 0.5  # the share of the wait that a reported reason has to explain


def communication_cost_ms(times: dict[int, RankTime], rows: Communications) -> float:
    """How much shorter a mean step would be without communication, in ms.

    If all ranks communicate together, a rank with a longer wait also waits for other ranks, and would still do so
    without communication. Then the rank that waits least counts in each step; otherwise the mean over ranks.
    """
    exposed = np.stack([time.per_step(time.exposed) for time in times.values()])
    collective = rows.where(rows.kind == Kind.COLLECTIVE)
    lengths = collective.end_ns - collective.arrival_ns
    members = np.bincount(collective.instance, minlength=1)[collective.instance]
    together = 2 * int(lengths[members == len(times)].sum()) >= int(lengths.sum()) > 0
    each_step = exposed.min(axis=0) if together else exposed.mean(axis=0)
    return float(each_step.mean()) / NS_A_MS


def why_exposed(mean: Breakdown, shape: CommunicationShape) -> str:
    """Says which communication is exposed, why, and what would change that; completes "... waits for"."""
    if not shape.backward_ms and not mean.computation:
        return (
            f"{shape.blocking_name or 'communication'}, {shape.collectives:.3g} collectives of "
            f"{format_bytes(shape.mean_bytes)} on average per step; the reason is unknown because computation was not "
            "recorded"
        )
    if shape.sharded:
        return _sharded(shape)
    if shape.blocking_ms > MOST * mean.exposed_communication:
        return _blocking_words(shape)
    exposed_ms = mean.exposed_communication
    return _latency(shape) or _link(shape, exposed_ms) or _buckets(shape, exposed_ms)


def _sharded(shape: CommunicationShape) -> str:
    gathers = (
        f"the all-gathers and reduce-scatters of a fully sharded model, {shape.collectives:.3g} of "
        f"{format_bytes(shape.mean_bytes)} on average per step"
    )
    fewer = "shard larger groups, or keep parameters gathered (reshard_after_forward=False)"
    if shape.blocks:
        return (
            f"{gathers}; on this backend each call blocks its thread, so prefetching cannot hide it; {fewer}"
        )
    return f"{gathers}, which the layers' computation does not hide; prefetch more, {fewer}"


def _blocking_words(shape: CommunicationShape) -> str:
    """Describes exposed communication other than gradients."""
    more = " and others" if shape.blocking_kinds > 1 else ""
    name = f"{shape.blocking_name or 'communication'}{more}"
    if not shape.backward_ms and not shape.buckets:
        return (
            f"{name}, {shape.blocking_count:.3g} per step, which no computation overlaps; the trace does not separate "
            "forward from backward, so it is unknown what they carry"
        )
    if shape.blocking_name in ("send", "receive", "send_receive"):
        return (
            f"messages between ranks, {shape.blocking_count:.3g} of {format_bytes(shape.blocking_bytes)} on average per "
            "step, with nothing else to compute meanwhile; split batches into more micro-batches, or place "
            "communicating stages on one host"
        )
    if shape.of_layers > MOST and shape.layers >= LAYERS:
        experts = shape.blocking_name == "all_to_all"
        kind = "expert parallelism does" if experts else "tensor, sequence and context parallelism do"
        what = (
            "balance the experts' tokens, or overlap it with other computation"
            if experts
            else "overlap it with the layers' computation, or give the group fewer ranks"
        )
        return (
            f"{name} between layers, {shape.blocking_count:.3g} of {format_bytes(shape.blocking_bytes)} on average per "
            f"step, which no computation overlaps, as {kind}; keep each group within one host, {what}"
        )
    return (
        f"{name} outside of the gradients, because the program blocks on {shape.blocking_count:.3g} of them per step; "
        "remove them, call them less often, or make them asynchronous"
    )


def _latency(shape: CommunicationShape) -> str:
    """Describes gradients so small that latency dominates; empty if they are larger."""
    if shape.collectives >= MANY and shape.mean_bytes < SMALL_BYTES and shape.largest_bytes < SMALL_BYTES:
        return _many(shape)
    if 0 < shape.gradient_bytes < SMALL_BYTES:
        return (
            f"only {format_bytes(shape.gradient_bytes)} of gradients: network latency dominates, and other bucket sizes "
            "do not change it; communicate less often (larger batches, accumulation), or use a network with lower "
            "latency"
        )
    return ""


def _link(shape: CommunicationShape, exposed_ms: float) -> str:
    """Describes gradients whose transfer takes longer than the computation that could hide it; empty otherwise."""
    beyond_ms = shape.volume_ms - shape.hiding_ms
    if not shape.backward_ms or not shape.buckets or beyond_ms < MOST * exposed_ms:
        return ""
    return (
        f"gradients, because the links are busy for {milliseconds(shape.busy_ms)} per step "
        f"({milliseconds(shape.volume_ms)} at full rate), and forward and backward, which could hide that, take "
        f"only {milliseconds(shape.hiding_ms)}: the link is the limit, and other buckets gain little; use a faster "
        "link or send less (larger batches, accumulation, lower precision)"
    )


def _buckets(shape: CommunicationShape, exposed_ms: float) -> str:
    """Describes gradients that could be hidden but start too late or in too many pieces."""
    if shape.collectives >= MANY and shape.mean_bytes < SMALL_BYTES:
        return _many(shape)
    share = shape.largest_bytes / shape.gradient_bytes if shape.gradient_bytes else 0.0
    late = 0.5 if share >= 0.9 else 0.8
    if shape.largest_ready is not None and share >= 0.5 and shape.largest_ready >= late:
        of_them = "all" if shape.buckets == 1 else f"{percent(share)} of them"
        largest = f"one {format_bytes(shape.largest_bytes)} bucket carries {of_them}"
        return f"gradients, because {largest} and {_starts(shape.largest_ready)}; try smaller buckets (headway optimize)"
    if shape.first_ready is not None and shape.first_ready >= 0.6:
        starts = _starts(shape.first_ready)
        return f"gradients, because the first bucket {starts}; try smaller buckets (headway optimize)"
    if shape.backward_ms and shape.busy_ms > shape.backward_ms:
        return (
            f"gradients, because the links are busy for {milliseconds(shape.busy_ms)} per step and backward, which could "
            f"hide that, takes only {milliseconds(shape.backward_ms)}; send less (larger batches, accumulation, lower "
            "precision) or overlap with forward as well (headway optimize)"
        )
    if shape.last_ready is not None and shape.last_ready >= 0.8:
        last = shape.last_bytes / shape.gradient_bytes
        if last * shape.busy_ms >= MOST * exposed_ms:
            return (
                f"gradients, because the last of {shape.buckets} buckets ({format_bytes(shape.last_bytes)}, "
                f"{percent(last)} of them) {_starts(shape.last_ready)}; try a smaller last bucket (headway optimize)"
            )
    return "gradients that backward does not hide; try other buckets (headway optimize)"


def _starts(ready: float) -> str:
    if ready >= 0.95:
        return "starts only when backward ends"
    return f"starts only when {percent(ready)} of backward is done"


def _many(shape: CommunicationShape) -> str:
    return (
        f"gradients, because they are sent in {shape.collectives:.0f} collectives of {format_bytes(shape.mean_bytes)} on "
        "average, and each pays the network's latency; try larger buckets (headway optimize)"
    )
