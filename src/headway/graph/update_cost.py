"""What an optimizer's updates cost where every bucket is updated by itself: once a bucket, and by its size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headway.trace.events import Event, Events, Kind, Stream

FEW_SIZES = 3
OVERHEAD_GUESS_NS = 100_000.0


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """What deferred updates cost: once a bucket, and all parameters on one rank (ns)."""

    overhead_ns: float = 0.0
    whole_ns: float = 0.0


def update_cost(
    updates: Mapping[int, Sequence[int]], sizes_bytes: Mapping[int, int], ranks: int
) -> UpdateCost:
    """The cost of updates that took ``updates[bucket]``, of which ``ranks`` share each: a line over bucket sizes."""
    buckets = [bucket for bucket in updates if bucket in sizes_bytes and updates[bucket]]
    if not buckets:
        return UpdateCost()
    times_ns = np.array([max(1.0, float(np.median(updates[bucket]))) for bucket in buckets])
    sizes = np.array([float(sizes_bytes[bucket]) for bucket in buckets])
    overhead_ns = min(OVERHEAD_GUESS_NS, float(times_ns.min()) / 2)
    if len(set(sizes.tolist())) >= FEW_SIZES:
        line = np.stack([1.0 / times_ns, sizes / times_ns], axis=1)
        fitted, *_ = np.linalg.lstsq(line, np.ones_like(times_ns), rcond=None)
        overhead_ns = float(np.clip(fitted[0], 0.0, times_ns.min()))
    return UpdateCost(overhead_ns, ranks * float((times_ns - overhead_ns).sum()))


def is_background(row: Event) -> bool:
    """Whether ``row`` is an update that a communication thread did for the main thread."""
    return row.kind == Kind.UPDATE and row.stream != Stream.COMPUTE


def background_update_cost(events: Events, ranks: int) -> UpdateCost:
    """The cost of one rank's recorded updates off its main thread, each shared by ``ranks``."""
    updates: dict[int, list[int]] = defaultdict(list)
    sizes_bytes: dict[int, int] = {}
    for row in events.of_kind(Kind.UPDATE, Kind.COLLECTIVE):
        if is_background(row):
            updates[row.bucket].append(row.duration_ns)
        elif row.kind == Kind.COLLECTIVE and row.bucket >= 0:
            sizes_bytes[row.bucket] = row.size_bytes
    return update_cost(updates, sizes_bytes, ranks)
