"""What crosses each link at each moment."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headway.arrays import Ints
from headway.diagnosis.communication import Communications
from headway.diagnosis.links import BITS_A_NS_IN_GBPS, ring_targets, sent_volumes
from headway.trace.format import Trace

Rates = tuple[Ints, npt.NDArray[np.float64]]


def link_rates(trace: Trace, rows: Communications) -> dict[tuple[str, str], Rates]:
    """The goodput from host to host as steps: times in ns, and the Gbit/s from each on.

    Each rank sends to its ring neighbour, evenly while a collective with all its members is in flight; traffic within a
    host is left out where there is any between hosts.
    """
    rows = rows.where(~rows.inner)
    hosts = trace.hosts
    targets = ring_targets(rows)
    lengths = rows.end_ns - rows.arrival_ns
    gbps = BITS_A_NS_IN_GBPS * sent_volumes(rows) / np.maximum(lengths, 1)
    sending = np.flatnonzero((gbps > 0) & (targets >= 0) & (lengths > 0))
    crossing: dict[tuple[str, str], list[int]] = {}
    for row, rank, target in zip(
        sending.tolist(), rows.rank[sending].tolist(), targets[sending].tolist(), strict=True
    ):
        if rank in hosts and target in hosts:
            crossing.setdefault((hosts[rank], hosts[target]), []).append(row)
    apart = any(source != target for source, target in crossing)
    return {
        (source, target): _steps(rows.arrival_ns[own], rows.end_ns[own], gbps[own])
        for (source, target), own in sorted(crossing.items())
        if not apart or source != target
    }


def _steps(starts: Ints, ends: Ints, rates: npt.NDArray[np.float64]) -> Rates:
    """The sum of rates, each of which holds from its start to its end."""
    times = np.concatenate([starts, ends])
    order = np.argsort(times, kind="stable")
    times = times[order]
    sums = np.cumsum(np.concatenate([rates, -rates])[order])
    in_flight = np.cumsum(np.repeat([1, -1], len(starts))[order])
    sums = np.where(
        in_flight > 0, np.maximum(sums, 0.0), 0.0
    )  # sums of rounded numbers end near zero, not at it
    last = np.append(times[1:] != times[:-1], True)
    return times[last], sums[last]
