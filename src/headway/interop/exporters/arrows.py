"""Arrows between ranks: from each send to its receive, and from the last member to arrive to the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.arrays import Ints
from headway.diagnosis.communication import Communications, match
from headway.interop.exporters.rank_tracks import MATCHED, ends_ns
from headway.trace.events import Kind
from headway.trace.format import Trace


@dataclass(frozen=True, slots=True, eq=False)
class Arrows:
    """All ranks' communication and the arrows in it.

    ``event`` (one a row of ``rows``) is the event's position among its rank's events, ``members`` how many rows its
    instance has. Arrows have ``cause`` and ``effect``, which are rows, and ``at_ns``: when the cause began, or the
    effect where that was later (``on_start``). No arrow goes to what was over before its cause began.
    """

    rows: Communications
    event: Ints
    members: Ints
    cause: Ints
    effect: Ints
    at_ns: Ints
    on_start: npt.NDArray[np.bool_]


def find_arrows(trace: Trace) -> Arrows:
    """Match communication across ranks and find what set what off."""
    rows = match(trace, messages=True)
    rows = rows.where(np.isin(rows.kind, MATCHED))
    rows = rows.where(np.isin(rows.kind, MATCHED))  # workers hand gradients to servers, not to each other
    event, start, end = [], [], []
    for _, events in sorted(trace.events.items()):  # in the order of the rows
        own = np.flatnonzero(np.logical_or.reduce([events.kind == kind for kind in MATCHED]))
        event.append(own)
        start.append(events.start_ns[own])
        end.append(ends_ns(events)[own])
    starts, ends = _joined(start), _joined(end)
    members = np.bincount(rows.instance)[rows.instance] if len(rows) else starts
    causing = np.flatnonzero(
        (rows.kind == Kind.SEND) | ((rows.kind == Kind.COLLECTIVE) & (rows.rank == rows.last_rank))
    )
    cause_of = np.full(int(rows.instance.max(initial=-1)) + 1, -1, dtype=np.int64)
    cause_of[rows.instance[causing]] = causing
    cause = cause_of[rows.instance]
    effect = np.flatnonzero((cause >= 0) & (cause != np.arange(len(rows))))
    cause = cause[effect]
    on_start = starts[effect] > starts[cause]
    kept = on_start | (starts[cause] < ends[effect])
    cause, effect, on_start = cause[kept], effect[kept], on_start[kept]
    at_ns = np.maximum(starts[cause], starts[effect])
    return Arrows(rows, _joined(event), members, cause, effect, at_ns, on_start)


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
