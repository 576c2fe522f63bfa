"""Link rates from the messages that a pipeline's stages sent each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from headway.graph.recorded_messages import both_ends
from headway.intervals import Intervals
from headway.trace.events import Kind
from headway.trace.format import Trace

SHORT_WAIT_NS = 100_000  # for what has arrived before
OF_THE_FASTEST = 0.1  # of a pair's messages: who waits for others first is told of an arrival late


class Rates(NamedTuple):
    """Of messages out of, into and within hosts, in Gbit/s; what no message took is left out."""

    up: dict[str, float]
    down: dict[str, float]
    local: float | None


def message_rates(trace: Trace, latency_us: float) -> Rates | None:
    """What single messages went at, less ``latency_us`` each; None where there are none.

    A host's rate is that of its fastest pair: a slower one is slow for the other end's sake.
    """
    seen: dict[tuple[str, str], list[float]] = defaultdict(list)
    flights = list(_flights(trace))
    for message in list(_alone(flights)) or flights:
        took_ns = max(1.0, message.end_ns - message.begin_ns - latency_us * 1e3)
        seen[message.hosts].append(8 * message.size_bytes / took_ns)
    rates = {hosts: float(np.quantile(each, 1 - OF_THE_FASTEST)) for hosts, each in seen.items()}
    if not rates:
        return None
    up: dict[str, float] = {}
    down: dict[str, float] = {}
    for (sender, receiver), rate in rates.items():
        if sender == receiver:
            continue
        up[sender] = max(up.get(sender, 0.0), rate)
        down[receiver] = max(down.get(receiver, 0.0), rate)
    return Rates(up, down, min((rate for (one, other), rate in rates.items() if one == other), default=None))


class _Flight(NamedTuple):
    hosts: tuple[str, str]
    begin_ns: int
    end_ns: int
    size_bytes: int
    awaited: bool  # whether the receiver waited when it arrived, and so knows when


def _flights(trace: Trace) -> Iterator[_Flight]:
    """Messages, from when both sides had asked for them."""
    waits = {
        rank: Intervals((row.start_ns, row.end_ns) for row in events.of_kind(Kind.WAIT))
        for rank, events in trace.events.items()
    }
    for message in both_ends(trace):
        hosts = trace.hosts[message.sender], trace.hosts[message.receiver]
        begin_ns, end_ns, size_bytes = message.begin_ns, message.received.end_ns, message.received.size_bytes
        if end_ns > begin_ns and size_bytes > 0:
            waited_ns = waits[message.receiver].share_of(begin_ns, end_ns) * (end_ns - begin_ns)
            yield _Flight(hosts, begin_ns, end_ns, size_bytes, waited_ns > SHORT_WAIT_NS)


def _alone(flights: list[_Flight]) -> Iterator[_Flight]:
    """Those with a known end, during which neither host sent, or received, another one, if they are on two."""
    disturbed = _overlapping(flights, 0) | _overlapping(flights, 1)
    for number, flight in enumerate(flights):
        source, target = flight.hosts
        if flight.awaited and (source == target or number not in disturbed):
            yield flight


def _overlapping(flights: list[_Flight], end: int) -> set[int]:
    """The numbers of those that overlap with another of the same host: the sender (``end`` 0) or the receiver (1)."""
    found: set[int] = set()
    longest: dict[str, int] = {}  # of each host, the flight that ends last of those before
    for number in sorted(range(len(flights)), key=lambda number: flights[number].begin_ns):
        host = flights[number].hosts[end]
        before = longest.get(host)
        if before is not None and flights[before].end_ns > flights[number].begin_ns:
            found |= {before, number}
        if before is None or flights[number].end_ns > flights[before].end_ns:
            longest[host] = number
    return found
