"""Parameter servers: what workers wait for when they push gradients and pull parameters."""

from __future__ import annotations

import numpy as np

from headway import intervals
from headway.diagnosis.communication import Communications
from headway.diagnosis.findings import Finding, of_each_step, percent
from headway.diagnosis.timeline import RankTime
from headway.trace.events import Kind
from headway.trace.format import Trace

SERVERS_STAND_OUT = 0.10  # of the step
BUSY = 0.5  # of what is waited for: from here on it is the servers' own work


def server_finding(
    trace: Trace, times: dict[int, RankTime], rows: Communications, step_ms: float
) -> Finding | None:
    """What pushes and pulls cost, where there are any; and whether the servers' own work is why."""
    served = np.isin(rows.kind, [Kind.PUSH, Kind.PULL])
    if not served.any():
        return None
    waited_ns = steps = 0
    waits = []
    for rank, time in times.items():
        own = served & (rows.rank == rank)
        spans = intervals.intersect(time.wait, intervals.union(rows.arrival_ns[own], rows.end_ns[own]))
        waited_ns += int(time.per_step(spans).sum())
        waits.append(spans)
        steps += len(time.step_start_ns)
    cost_ms = waited_ns / steps / 1e6
    share = _busy_share(trace, intervals.join(*waits))
    because = (
        f"the servers sum and update for {percent(share)} of that; add servers, or spread keys over them"
        if share > BUSY
        else "the servers' own work is little of it; look at the network between them, push less, or less often"
    )
    count = served.sum() / steps
    sentence = (
        f"Parameter servers are the bottleneck: workers wait {of_each_step(cost_ms, step_ms)} for {count:.3g} pushes "
        f"and pulls; {because}."
    )
    return Finding("parameter_servers", cost_ms, sentence, (), cost_ms >= SERVERS_STAND_OUT * step_ms)


def _busy_share(trace: Trace, waits: intervals.Spans) -> float:
    """For how much of ``waits`` some server sums or updates."""
    busy = [
        intervals.union(own.start_ns, own.end_ns)
        for own in (events.of_kind(Kind.SUM, Kind.OPTIMIZER) for events in trace.servers.values())
    ]
    length_ns = intervals.length_ns(waits)
    if not busy or not length_ns:
        return 0.0
    return intervals.length_ns(intervals.intersect(intervals.join(*busy), waits)) / length_ns
