"""Finds links that are slower than the others, always or at times, from the kernel's counters per connection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.arrays import Flags, Floats
from headway.diagnosis.breakdown import NS_A_MS, RankTime
from headway.diagnosis.communication import Communications
from headway.diagnosis.findings import Finding, of_each_step, percent
from headway.trace.events import Kind
from headway.trace.format import Trace
from headway.units import format_rate

SLOW = 0.5  # of the usual rate
ALWAYS, MOSTLY, SOMETIMES = 0.9, 0.25, 0.08  # of the steps
STANDS_OUT = 0.05  # of the step
ALIKE = 0.5  # of a link's cost: a neighbour that costs this much may be waiting for the same transfers
LEAST_BYTES = 65_536  # per connection and step: the rate of smaller transfers means nothing


@dataclass(frozen=True)
class SlowLink:
    """One direction between two hosts that is slower than the others, in ``share`` of the steps.

    ``gbps`` is its goodput in those steps. ``usual_gbps`` is its goodput in the other steps, or else that of the other
    links. ``ranks`` are the sender and the receiver.
    """

    source: str
    target: str
    ranks: tuple[int, int]
    gbps: float
    usual_gbps: float
    share: float
    cost_ms: float  # per step


@dataclass(frozen=True)
class _Samples:
    """Columns with one row per connection and step. ``link`` is an index into ``links``, pairs of hosts."""

    links: tuple[tuple[str, str], ...]
    link: npt.NDArray[np.int64]
    source: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]  # index of the step in the recording
    size_bytes: Floats
    busy_ns: Floats
    rate: Floats  # delivered bytes per second


def find_slow_link(
    trace: Trace, times: dict[int, RankTime], rows: Communications, steps: tuple[int, ...]
) -> SlowLink | None:
    """The link that delays communication most; None if no link does, or without kernel counters."""
    samples = _samples(trace, steps)
    if not len(samples.links):
        return None
    # Every link counts once, however many connections use it.
    rates = [np.median(samples.rate[samples.link == link]) for link in range(len(samples.links))]
    slow = samples.rate < SLOW * float(np.median(rates))
    waits = _waits(times, rows)
    assessed = (_assess(samples, link, slow, waits) for link in range(len(samples.links)))
    slow_links = [candidate for candidate in assessed if candidate is not None]
    costliest = max(slow_links, key=lambda candidate: (candidate.cost_ms, -candidate.gbps), default=None)
    return None if costliest is None else slowest_of_shared_waits(costliest, slow_links)


def slowest_of_shared_waits(link: SlowLink, slow_links: Sequence[SlowLink]) -> SlowLink:
    """``link`` itself, or the neighbour among ``slow_links`` that makes it look slow.

    Acknowledgements queue behind other traffic of their sender and receiver. So a link whose ends are busy in the other
    direction looks slow, and the same waits count as its cost.
    """
    neighbours = [
        candidate
        for candidate in slow_links
        if (candidate.source == link.target or candidate.target == link.source)
        and candidate.cost_ms >= ALIKE * link.cost_ms
    ]
    return min([link, *neighbours], key=lambda candidate: candidate.gbps)


def link_finding(link: SlowLink, step_ms: float) -> Finding:
    """Reports a slow link."""
    name = f"link from {link.source} to {link.target}"
    rates = f"{format_rate(link.gbps)} where {format_rate(link.usual_gbps)} is usual"
    cost = f"communication waits {of_each_step(link.cost_ms, step_ms)} for it"
    if link.share >= ALWAYS:
        cause = "slow_link"
        sentence = (
            f"The {name} is slow: it delivers {rates}, and {cost}; check its port, cable and rate limits, and what "
            "else uses it all the time."
        )
    else:
        cause = "other_traffic"
        sentence = (
            f"The {name} carries other traffic at times: in {percent(link.share)} of the steps it delivers "
            f"{rates}, and {cost}; find out what else sends over it, or send less at those times."
        )
    return Finding(cause, link.cost_ms, sentence, link.ranks, link.cost_ms >= STANDS_OUT * step_ms)


def _assess(samples: _Samples, link: int, slow: Flags, waits: _Waits) -> SlowLink | None:
    """Returns this link if it is slow in enough steps, else None.

    The kernel's delivery rate decides, and the goodput has to agree: a connection that is busy only because
    acknowledgements arrive late has a high delivery rate.
    """
    of_link = samples.link == link
    slow = of_link & slow
    share = float(slow.sum() / of_link.sum())
    if share < SOMETIMES:
        return None
    hit = np.unique(samples.step[slow])
    at_times = share < ALWAYS and len(hit) < len(waits.exposed_ms)
    if at_times and _gbps(samples, slow) <= SLOW * _gbps(samples, of_link & ~slow):
        wider = slow | _as_slow(samples, of_link & ~slow, _gbps(samples, slow))
        if len(np.unique(samples.step[wider])) < len(waits.exposed_ms):
            slow = wider
        share = float(slow.sum() / of_link.sum())
        usual_gbps = _gbps(samples, of_link & ~slow)
        cost_ms = waits.beyond_others(np.unique(samples.step[slow]))
    elif share < MOSTLY:
        return None
    else:  # its other steps are no faster, whatever rate the kernel measured
        slow, share = of_link, 1.0
        others_gbps = [
            _gbps(samples, samples.link == index) for index in range(len(samples.links)) if index != link
        ]
        usual_gbps = float(np.median(others_gbps)) if others_gbps else 0.0
        if _gbps(samples, slow) > SLOW * usual_gbps:
            return None
        cost_ms = waits.spared_by(_gbps(samples, slow) / usual_gbps)
    worst = np.flatnonzero(slow)[np.argmin(samples.rate[slow])]
    ranks = int(samples.source[worst]), int(samples.target[worst])
    return SlowLink(*samples.links[link], ranks, _gbps(samples, slow), usual_gbps, share, cost_ms)


def _as_slow(samples: _Samples, spared: Flags, slow_gbps: float) -> Flags:
    """The remaining samples with as little goodput: the kernel's rate is a snapshot and may miss slow steps."""
    as_slow: Flags = spared & (8 * samples.size_bytes * SLOW <= slow_gbps * samples.busy_ns)
    return as_slow


def _gbps(samples: _Samples, picked: Flags) -> float:
    return float(8 * samples.size_bytes[picked].sum() / max(samples.busy_ns[picked].sum(), 1.0))


@dataclass(frozen=True)
class _Waits:
    """Communication per step in ms, averaged over ranks; ``large_ms`` is the duration of a large collective."""

    exposed_ms: Floats
    busy_ms: Floats
    large_ms: float

    def beyond_others(self, hit: npt.NDArray[np.int64]) -> float:
        """How much shorter a mean step would be if these steps exposed no more than the others (at least one)."""
        others_ms = np.delete(self.exposed_ms, hit).mean()
        return float(np.maximum(self.exposed_ms[hit] - others_ms, 0.0).sum()) / len(self.exposed_ms)

    def spared_by(self, share: float) -> float:
        """How much shorter a mean step would be if communication took this share of the time.

        As much of it would be hidden as now, except the last collective, which nothing hides.
        """
        left_ms = np.maximum(self.exposed_ms - (1 - share) * self.busy_ms, share * self.large_ms)
        return float(np.maximum(self.exposed_ms - left_ms, 0.0).mean())


def _waits(times: dict[int, RankTime], rows: Communications) -> _Waits:
    exposed = np.mean([time.per_step(time.exposed) for time in times.values()], axis=0)
    busy = np.mean([time.per_step(time.communicating) for time in times.values()], axis=0)
    lengths_ns = (rows.end_ns - rows.arrival_ns)[rows.kind == Kind.COLLECTIVE].astype(np.float64)
    large_ns = float((lengths_ns**2).sum() / lengths_ns.sum()) if lengths_ns.any() else 0.0
    return _Waits(exposed / NS_A_MS, busy / NS_A_MS, large_ns / NS_A_MS)


def _samples(trace: Trace, steps: tuple[int, ...]) -> _Samples:
    """The traffic of connections between hosts in the recorded steps, where the kernel measured a delivery rate."""
    place = {step: number for number, step in enumerate(steps)}
    links: dict[tuple[str, str], int] = {}
    rows: list[tuple[int, int, int, int, int, int, int]] = []
    for rank, events in trace.events.items():
        carried, rates = events.of_kind(Kind.LINK), events.of_kind(Kind.DELIVERY_RATE)
        rates_of: dict[tuple[int, int], list[int]] = {}
        uses_of: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for peer, step, rate in zip(
            rates.peer.tolist(), rates.step.tolist(), rates.size_bytes.tolist(), strict=True
        ):
            rates_of.setdefault((peer, step), []).append(rate)
        columns = (carried.peer, carried.step, carried.size_bytes, carried.duration_ns)
        for peer, step, size_bytes, busy_ns in zip(*(column.tolist() for column in columns), strict=True):
            uses_of.setdefault((peer, step), []).append((size_bytes, busy_ns))
        for (peer, step), uses in uses_of.items():
            hosts = trace.hosts.get(rank, ""), trace.hosts.get(peer, "")
            delivered = rates_of.get((peer, step), [])
            if step not in place or not delivered or not all(hosts) or hosts[0] == hosts[1]:
                continue
            # Of several connections to one peer, the busiest shows what the link delivers.
            size_bytes, busy_ns = max(uses)
            rate = (
                delivered[uses.index((size_bytes, busy_ns))]
                if len(delivered) == len(uses)
                else max(delivered)
            )
            if size_bytes >= LEAST_BYTES and busy_ns > 0 and rate > 0:
                link = links.setdefault(hosts, len(links))
                rows.append((link, rank, peer, place[step], size_bytes, busy_ns, rate))
    table = np.array(rows, dtype=np.int64).reshape(-1, 7).T
    link, source, target, step = table[:4]
    return _Samples(tuple(links), link, source, target, step, *table[4:].astype(np.float64))
