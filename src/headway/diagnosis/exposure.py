"""What exposed communication costs, why it is exposed, and what could change that.

It costs less than what ranks wait for it, where they wait for one another as well.
"""

from __future__ import annotations

import numpy as np

from headway.diagnosis.breakdown import NS_A_MS, Breakdown
from headway.diagnosis.communication import Communications
from headway.diagnosis.findings import milliseconds, percent
from headway.diagnosis.gradients import CommunicationShape
from headway.diagnosis.timeline import RankTime
from headway.trace.events import Kind
from headway.units import format_bytes

SMALL_BYTES = 256 * 1024
MANY = 16  # collectives a step
LAYERS = 2  # places a step between which computation waits, from which on these are layers
MOST = 0.5  # of what is waited: what a cause that is told has to explain


def communication_cost_ms(times: dict[int, RankTime], rows: Communications) -> float:
    """By how much a mean step would be shorter without communication, in ms.

    Where all ranks communicate together, a rank that waits for it longer than another does also waits for that other
    rank, and would still do so: what counts is the rank that waits least, in each step. Otherwise it is the mean over
    ranks.
    """
    exposed = np.stack([time.per_step(time.exposed) for time in times.values()])
    collective = rows.where(rows.kind == Kind.COLLECTIVE)
    lengths = collective.end_ns - collective.arrival_ns
    members = np.bincount(collective.instance, minlength=1)[collective.instance]
    together = 2 * int(lengths[members == len(times)].sum()) >= int(lengths.sum()) > 0
    each_step = exposed.min(axis=0) if together else exposed.mean(axis=0)
    return float(each_step.mean()) / NS_A_MS


def why_exposed(mean: Breakdown, shape: CommunicationShape) -> str:
    """What is waited for, why, and what to do: only what could change it."""
    if not shape.backward_ms and not mean.computation:
        return (
            f"{shape.blocking_name or 'communication'}, {shape.collectives:.3g} collectives of "
            f"{format_bytes(shape.mean_bytes)} on average a step; computation was not recorded, so it is unknown why "
            "nothing hides them"
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
        f"{format_bytes(shape.mean_bytes)} on average a step"
    )
    fewer = "shard larger groups, or keep parameters gathered (reshard_after_forward=False)"
    if shape.blocks:
        return f"{gathers}, each of which blocks its thread on this backend, so that no prefetch hides it; {fewer}"
    return f"{gathers}, which the computation of its layers does not hide; prefetch more, {fewer}"


def _blocking_words(shape: CommunicationShape) -> str:
    """What is no gradients and was waited for."""
    others = " and others" if shape.blocking_kinds > 1 else ""
    name = f"{shape.blocking_name or 'communication'}{others}"
    if not shape.backward_ms and not shape.buckets:
        return (
            f"{name}, {shape.blocking_count:.3g} a step, under which nothing computes; the trace does not tell forward "
            "from backward, and so not what they carry"
        )
    if shape.blocking_name in ("send", "receive", "send_receive"):
        return (
            f"messages between ranks, {shape.blocking_count:.3g} of {format_bytes(shape.blocking_bytes)} on average a "
            "step, while these have nothing else to compute; split batches into more micro-batches, or place stages "
            "that exchange them inside one host"
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
            f"{name} between layers, {shape.blocking_count:.3g} of {format_bytes(shape.blocking_bytes)} on average a "
            f"step, under which nothing computes, as {kind}; keep each group inside one host, {what}"
        )
    return (
        f"{name} outside of the gradients, because the program blocks on {shape.blocking_count:.3g} of them a step; "
        "remove them, call them less often, or start them asynchronously"
    )


def _latency(shape: CommunicationShape) -> str:
    """Gradients so small that each collective's latency is what they cost; empty where they are not."""
    if shape.collectives >= MANY and shape.mean_bytes < SMALL_BYTES and shape.largest_bytes < SMALL_BYTES:
        return _many(shape)
    if 0 < shape.gradient_bytes < SMALL_BYTES:
        return (
            f"gradients, of which there are only {format_bytes(shape.gradient_bytes)}: their cost is the network's "
            "latency, which other bucket sizes do not change; communicate less often (larger batches, accumulation), "
            "or over a network with lower latency"
        )
    return ""


def _link(shape: CommunicationShape, exposed_ms: float) -> str:
    """Gradients whose bytes alone take longer than all that could hide them; empty where they do not."""
    beyond_ms = shape.volume_ms - shape.hiding_ms
    if not shape.backward_ms or not shape.buckets or beyond_ms < MOST * exposed_ms:
        return ""
    return (
        f"gradients, because the links are busy for {milliseconds(shape.busy_ms)} of it "
        f"({milliseconds(shape.volume_ms)} for the bytes alone), while forward and backward, all that could hide that, "
        f"take {milliseconds(shape.hiding_ms)}: the link is the limit, and other buckets gain little; use a faster "
        "link or send less (larger batches, accumulation, lower precision)"
    )


def _buckets(shape: CommunicationShape, exposed_ms: float) -> str:
    """Gradients that could be hidden, but start too late or in too many pieces."""
    if shape.collectives >= MANY and shape.mean_bytes < SMALL_BYTES:
        return _many(shape)
    share = shape.largest_bytes / shape.gradient_bytes if shape.gradient_bytes else 0.0
    late = 0.5 if share >= 0.9 else 0.8
    if shape.largest_ready is not None and share >= 0.5 and shape.largest_ready >= late:
        of_them = "all" if shape.buckets == 1 else f"{percent(share)} of them"
        one = f"one {format_bytes(shape.largest_bytes)} bucket carries {of_them}"
        return f"gradients, because {one} and {_starts(shape.largest_ready)}; try smaller buckets (headway optimize)"
    if shape.first_ready is not None and shape.first_ready >= 0.6:
        starts = _starts(shape.first_ready)
        return f"gradients, because the first bucket {starts}; try smaller buckets (headway optimize)"
    if shape.backward_ms and shape.busy_ms > shape.backward_ms:
        return (
            f"gradients, because the links are busy for {milliseconds(shape.busy_ms)} of it and backward, which could "
            f"hide that, takes only {milliseconds(shape.backward_ms)}; send less (larger batches, accumulation, lower "
            "precision) or hide it under forward as well (headway optimize)"
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
        f"gradients, because they travel in {shape.collectives:.0f} collectives of {format_bytes(shape.mean_bytes)} on "
        "average and each pays the network's latency; try larger buckets (headway optimize)"
    )
