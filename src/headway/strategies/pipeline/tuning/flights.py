"""Messages in flight: what each was carried at, less what the pipeline's own other messages took of the same links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from headway.scheduling.pipeline.program import Message
from headway.strategies.pipeline.tuning.observed import ObservedStep

Way = tuple[int, int]
"""From one rank to another."""


class Flight(NamedTuple):
    """A message on its way, from when it could leave to when it had arrived.

    ``alone_ns`` is how long it would have taken without the pipeline's other messages, if links are shared evenly.
    """

    way: Way
    begin_ns: int
    end_ns: int
    size_bytes: int
    alone_ns: float


def flights_of(step: ObservedStep, boundary_bytes: Sequence[int]) -> list[Flight]:
    """All messages of a step, whose sizes are ``boundary_bytes`` of the boundaries that they cross."""
    found = sorted(_unshared(step, boundary_bytes), key=lambda flight: flight.begin_ns)
    moments = sorted({moment for flight in found for moment in (flight.begin_ns, flight.end_ns)})
    alone_ns = [0.0] * len(found)
    in_flight: set[int] = set()
    coming = iter(range(len(found)))
    upcoming = next(coming, None)
    for begin_ns, end_ns in pairwise(moments):
        while upcoming is not None and found[upcoming].begin_ns <= begin_ns:
            in_flight.add(upcoming)
            upcoming = next(coming, None)
        in_flight = {number for number in in_flight if found[number].end_ns > begin_ns}
        sends, receives = defaultdict[int, int](int), defaultdict[int, int](int)
        for number in in_flight:
            sender, receiver = found[number].way
            sends[sender] += 1
            receives[receiver] += 1
        for number in in_flight:
            sender, receiver = found[number].way
            alone_ns[number] += (end_ns - begin_ns) / max(sends[sender], receives[receiver])
    return [flight._replace(alone_ns=took) for flight, took in zip(found, alone_ns, strict=True)]


def _unshared(step: ObservedStep, boundary_bytes: Sequence[int]) -> Iterator[Flight]:
    """Flights from when both ends had asked and the connection was free: those of a way follow each other.

    A receiver's word that it is ready follows what it was sending the other way when it posted the receive (Gloo).
    """
    by_way: dict[Way, list[tuple[int, int, int, Message]]] = defaultdict(list)
    for receiver in step.ranks:
        for message, span in receiver.received.items():
            sent_ns = step.ranks[message.sender].sent_ns[message]
            by_way[message.sender, message.receiver].append((sent_ns, span.begin_ns, span.end_ns, message))
    for way, own in by_way.items():
        own.sort()
        back = sorted((sent_ns, end_ns) for sent_ns, _, end_ns, _ in by_way.get((way[1], way[0]), ()))
        free_ns = 0
        for sent_ns, posted_ns, end_ns, message in own:
            ready_ns = max([posted_ns, *(ended for began, ended in back if began < posted_ns < ended)])
            begin_ns = max(sent_ns, min(ready_ns, end_ns), free_ns)
            free_ns = end_ns
            if end_ns > begin_ns:
                yield Flight(way, begin_ns, end_ns, boundary_bytes[message.boundary], 0.0)
