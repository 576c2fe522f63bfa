"""Links that are slower than the others, always or at times: told from what the kernel counted of each connection."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.diagnose.breakdown import NS_A_MS
from headway.diagnose.findings import Finding, of_each_step, percent
from headway.diagnose.timeline import RankTime
from headway.trace.events import Kind
from headway.trace.format import Trace
from headway.units import format_rate

SLOW = 0.5  # of what links usually deliver
ALWAYS, SOMETIMES = 0.9, 0.08  # of the steps
STANDS_OUT = 0.05  # of the step
LEAST_BYTES = 65_536  # that a connection has to carry in a step for its rate to mean something

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SlowLink:
    """One direction between two hosts that delivers less than the others: in ``share`` of the steps.

    ``gbps`` is its goodput in those steps, and ``usual_gbps`` its own otherwise, or else the other links'.
    """

    source: str
    target: str
    ranks: tuple[int, int]
    gbps: float
    usual_gbps: float
    share: float
    cost_ms: float  # a step


@dataclass(frozen=True)
class _Samples:
    """Columns, a row a connection and step: what it carried, for how long it was busy, what arrived a second."""

    source: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]
    size_bytes: Floats
    busy_ns: Floats
    rate: Floats


def find_slow_link(trace: Trace, times: dict[int, RankTime], steps: tuple[int, ...]) -> SlowLink | None:
    """The link that holds communication up most, where one does. Traces without such counts have none."""
    samples = _samples(trace)
    carrying = samples.size_bytes >= LEAST_BYTES
    if not carrying.any():
        return None
    usual_rate = float(np.median(samples.rate[carrying]))
    pairs = sorted(
        set(zip(samples.source[carrying].tolist(), samples.target[carrying].tolist(), strict=True))
    )
    of_pair = {pair: carrying & (samples.source == pair[0]) & (samples.target == pair[1]) for pair in pairs}
    exposed_ms = _exposed_ms(times)
    found = [_judged(trace, samples, pair, of_pair, usual_rate, exposed_ms, steps) for pair in pairs]
    slow = [one for one in found if one is not None]
    return max(slow, key=lambda one: (one.cost_ms, -one.gbps), default=None)


def link_finding(link: SlowLink, step_ms: float) -> Finding:
    """A slow link in words."""
    name = f"link from {link.source} to {link.target}"
    rates = f"{format_rate(link.gbps)} where {format_rate(link.usual_gbps)} is usual"
    cost = f"communication waits {of_each_step(link.cost_ms, step_ms)} for it"
    if link.share >= ALWAYS:
        cause = "slow_link"
        sentence = (
            f"The {name} is slow: it delivers {rates}, and {cost}; look at its port, cable and rate limits, and at "
            "what else uses it all the time."
        )
    else:
        cause = "other_traffic"
        sentence = (
            f"The {name} is taken by other traffic at times: in {percent(link.share)} of the steps it delivers "
            f"{rates}, and {cost}; look at who else sends there, or send less meanwhile."
        )
    return Finding(cause, link.cost_ms, sentence, link.ranks, link.cost_ms >= STANDS_OUT * step_ms)


def _judged(
    trace: Trace,
    samples: _Samples,
    pair: tuple[int, int],
    of_pair: dict[tuple[int, int], Flags],
    usual_rate: float,
    exposed_ms: Floats,
    steps: tuple[int, ...],
) -> SlowLink | None:
    """This pair's link, where it is slow in enough of the steps.

    The kernel's rate of delivery tells: a connection that is only busy because acknowledgements come late has a high
    one.
    """
    own = of_pair[pair]
    slow = own & (samples.rate < SLOW * usual_rate)
    share = float(slow.sum() / max(own.sum(), 1))
    if share < SOMETIMES or trace.hosts[pair[0]] == trace.hosts[pair[1]]:
        return None
    gbps = _gbps(samples, slow)
    if share < ALWAYS:
        usual_gbps = _gbps(samples, own & ~slow)
    else:
        others = [_gbps(samples, mask) for other, mask in of_pair.items() if other != pair]
        usual_gbps = float(np.median(others)) if others else 0.0
    if gbps > SLOW * usual_gbps:
        return None
    index = {step: number for number, step in enumerate(steps)}
    hit = np.unique([index[step] for step in samples.step[slow].tolist() if step in index]).astype(np.intp)
    spared = np.setdiff1d(np.arange(len(steps)), hit)
    # What is exposed without it: as in the steps that it spares, or else what a link as quick as others would leave.
    least_ms = float(exposed_ms[spared].mean()) if len(spared) else 0.0
    kept_ms = np.maximum(exposed_ms[hit] * gbps / usual_gbps, least_ms)
    cost_ms = float(np.maximum(exposed_ms[hit] - kept_ms, 0.0).sum()) / len(steps)
    hosts = trace.hosts[pair[0]], trace.hosts[pair[1]]
    return SlowLink(*hosts, pair, gbps, usual_gbps, share, cost_ms)


def _gbps(samples: _Samples, picked: Flags) -> float:
    return float(8 * samples.size_bytes[picked].sum() / max(samples.busy_ns[picked].sum(), 1.0))


def _exposed_ms(times: dict[int, RankTime]) -> Floats:
    """What each step waited for communication, averaged over ranks."""
    each = [time.per_step(time.exposed) / NS_A_MS for time in times.values()]
    mean: Floats = np.mean(each, axis=0)
    return mean


def _samples(trace: Trace) -> _Samples:
    columns: list[list[npt.NDArray[np.generic]]] = [[] for _ in range(6)]
    for rank, events in trace.events.items():
        carried, rates = events.of_kind(Kind.LINK), events.of_kind(Kind.DELIVERY_RATE)
        rate_of: dict[tuple[int, int], float] = {}
        for peer, step, rate in zip(
            rates.peer.tolist(), rates.step.tolist(), rates.size_bytes.tolist(), strict=True
        ):
            rate_of[peer, step] = min(rate, rate_of.get((peer, step), rate))
        keys = list(zip(carried.peer.tolist(), carried.step.tolist(), strict=True))
        known = np.array([key in rate_of for key in keys], dtype=bool)
        values = (
            np.full(len(keys), rank),
            carried.peer,
            carried.step,
            carried.size_bytes.astype(np.float64),
            carried.duration_ns.astype(np.float64),
            np.array([rate_of.get(key, 0.0) for key in keys], dtype=np.float64),
        )
        for column, value in zip(columns, values, strict=True):
            column.append(value[known])
    joined = [np.concatenate(column) if column else np.zeros(0) for column in columns]
    source, target, step = (column.astype(np.int64) for column in joined[:3])
    return _Samples(source, target, step, *joined[3:])
