"""Links that are slower than the others, always or at times: told from what the kernel counted of each connection."""

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

SLOW = 0.5  # of what links usually deliver
ALWAYS, MOSTLY, SOMETIMES = 0.9, 0.25, 0.08  # of the steps
STANDS_OUT = 0.05  # of the step
ALIKE = 0.5  # of a link's cost: from there on a neighbour's may be the same waits
LEAST_BYTES = 65_536  # that a connection has to carry in a step for its rate to mean something


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
    """Columns, a row a connection and step: which link it uses, what it carried, for how long it was busy, its rate.

    A link is the place of its two hosts in ``links``.
    """

    links: tuple[tuple[str, str], ...]
    link: npt.NDArray[np.int64]
    source: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]  # the step's place in the recording
    size_bytes: Floats
    busy_ns: Floats
    rate: Floats  # bytes a second that arrive


def find_slow_link(
    trace: Trace, times: dict[int, RankTime], rows: Communications, steps: tuple[int, ...]
) -> SlowLink | None:
    """The link that holds communication up most, where one does. Traces without such counts have none."""
    samples = _samples(trace, steps)
    if not len(samples.links):
        return None
    # Links count alike, however many connections of the job go through each.
    rates = [np.median(samples.rate[samples.link == link]) for link in range(len(samples.links))]
    slow = samples.rate < SLOW * float(np.median(rates))
    waits = _waits(times, rows)
    judged = (_judged(samples, link, slow, waits) for link in range(len(samples.links)))
    found = [one for one in judged if one is not None]
    costliest = max(found, key=lambda one: (one.cost_ms, -one.gbps), default=None)
    return None if costliest is None else slowest_of_shared_waits(costliest, found)


def slowest_of_shared_waits(link: SlowLink, found: Sequence[SlowLink]) -> SlowLink:
    """What makes ``link`` slow, of the links ``found``: itself, or a neighbour that is slower still.

    Acknowledgements queue behind what their sender sends, and behind what their receiver receives: a link whose ends
    are busy in the other direction looks slow, and the same waits count as its cost.
    """
    neighbours = [
        one
        for one in found
        if (one.source == link.target or one.target == link.source) and one.cost_ms >= ALIKE * link.cost_ms
    ]
    return min([link, *neighbours], key=lambda one: one.gbps)


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
            f"The {name} carries other traffic at times: in {percent(link.share)} of the steps it delivers "
            f"{rates}, and {cost}; look for what else sends over it, or send less at those times."
        )
    return Finding(cause, link.cost_ms, sentence, link.ranks, link.cost_ms >= STANDS_OUT * step_ms)


def _judged(samples: _Samples, link: int, slow: Flags, waits: _Waits) -> SlowLink | None:
    """This link, where it is slow in enough of the steps.

    The kernel's rate of delivery tells: a connection that is only busy because acknowledgements come late has a high
    one. What was delivered in the time that the connection was busy has to agree.
    """
    own = samples.link == link
    slow = own & slow
    share = float(slow.sum() / own.sum())
    if share < SOMETIMES:
        return None
    hit = np.unique(samples.step[slow])
    at_times = share < ALWAYS and len(hit) < len(waits.exposed_ms)
    if at_times and _gbps(samples, slow) <= SLOW * _gbps(samples, own & ~slow):
        wider = slow | _as_slow(samples, own & ~slow, _gbps(samples, slow))
        if len(np.unique(samples.step[wider])) < len(waits.exposed_ms):
            slow = wider
        share = float(slow.sum() / own.sum())
        usual_gbps = _gbps(samples, own & ~slow)
        cost_ms = waits.beyond_others(np.unique(samples.step[slow]))
    elif share < MOSTLY:
        return None
    else:  # its other steps are no better, whatever the kernel made of them
        slow, share = own, 1.0
        others = [_gbps(samples, samples.link == one) for one in range(len(samples.links)) if one != link]
        usual_gbps = float(np.median(others)) if others else 0.0
        if _gbps(samples, slow) > SLOW * usual_gbps:
            return None
        cost_ms = waits.spared_by(_gbps(samples, slow) / usual_gbps)
    worst = np.flatnonzero(slow)[np.argmin(samples.rate[slow])]
    ranks = int(samples.source[worst]), int(samples.target[worst])
    return SlowLink(*samples.links[link], ranks, _gbps(samples, slow), usual_gbps, share, cost_ms)


def _as_slow(samples: _Samples, spared: Flags, slow_gbps: float) -> Flags:
    """Those of the steps in which nothing was noticed that delivered as little: the rate is that of one moment."""
    found: Flags = spared & (8 * samples.size_bytes * SLOW <= slow_gbps * samples.busy_ns)
    return found


def _gbps(samples: _Samples, picked: Flags) -> float:
    return float(8 * samples.size_bytes[picked].sum() / max(samples.busy_ns[picked].sum(), 1.0))


@dataclass(frozen=True)
class _Waits:
    """What communication took of each step in ms, averaged over ranks; ``one_ms`` is how long a large one takes."""

    exposed_ms: Floats
    busy_ms: Floats
    one_ms: float

    def beyond_others(self, hit: npt.NDArray[np.int64]) -> float:
        """By how much a mean step would be shorter if these steps exposed no more than the others, which exist."""
        others_ms = np.delete(self.exposed_ms, hit).mean()
        return float(np.maximum(self.exposed_ms[hit] - others_ms, 0.0).sum()) / len(self.exposed_ms)

    def spared_by(self, share: float) -> float:
        """By how much a mean step would be shorter if communication took this share of the time.

        It would hide as much as it does, but for the last of it, which nothing hides.
        """
        left_ms = np.maximum(self.exposed_ms - (1 - share) * self.busy_ms, share * self.one_ms)
        return float(np.maximum(self.exposed_ms - left_ms, 0.0).mean())


def _waits(times: dict[int, RankTime], rows: Communications) -> _Waits:
    exposed = np.mean([time.per_step(time.exposed) for time in times.values()], axis=0)
    busy = np.mean([time.per_step(time.communicating) for time in times.values()], axis=0)
    each = (rows.end_ns - rows.arrival_ns)[rows.kind == Kind.COLLECTIVE].astype(np.float64)
    one = float((each**2).sum() / each.sum()) if each.any() else 0.0
    return _Waits(exposed / NS_A_MS, busy / NS_A_MS, one / NS_A_MS)


def _samples(trace: Trace, steps: tuple[int, ...]) -> _Samples:
    """What the connections between hosts carried in the recorded steps, where the kernel knew at which rate."""
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
            known = rates_of.get((peer, step), [])
            if step not in place or not known or not all(hosts) or hosts[0] == hosts[1]:
                continue
            # Of several connections to one peer, the one that carries most tells what the link delivers.
            size_bytes, busy_ns = max(uses)
            rate = known[uses.index((size_bytes, busy_ns))] if len(known) == len(uses) else max(known)
            if size_bytes >= LEAST_BYTES and busy_ns > 0 and rate > 0:
                link = links.setdefault(hosts, len(links))
                rows.append((link, rank, peer, place[step], size_bytes, busy_ns, rate))
    table = np.array(rows, dtype=np.int64).reshape(-1, 7).T
    link, source, target, step = table[:4]
    return _Samples(tuple(links), link, source, target, step, *table[4:].astype(np.float64))
