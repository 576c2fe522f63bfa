"""The messages of a recorded pipeline: when each rank asked for its end of one, and when it had waited for it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from headway.graph.timeline import Item, MessageEnd, Point
from headway.trace.events import Event, Kind
from headway.trace.format import Trace

Points = Mapping[tuple[int, int], Sequence[tuple[int, Item]]]
"""By rank and step: moments, and what happens then."""


class RecordedMessage(NamedTuple):
    """A message that both ranks have recorded, each an event of its own."""

    sender: int
    sent: Event
    receiver: int
    received: Event

    @property
    def begin_ns(self) -> int:
        """When both had asked for it."""
        return max(self.sent.enqueue_ns, self.received.enqueue_ns)


def pipeline_messages(trace: Trace) -> Points:
    """The points of the messages between stages whose both ends were recorded, in the same step."""
    found: dict[tuple[int, int], list[tuple[int, Item]]] = defaultdict(list)
    for message in both_ends(trace):
        for rank, row in ((message.sender, message.sent), (message.receiver, message.received)):
            asked = _item(Point.MESSAGE, row)
            found[rank, row.step].append((row.enqueue_ns, asked))
            if row.duration_ns:
                found[rank, row.step].append((row.end_ns, asked._replace(kind=Point.ARRIVED)))
    return found


def both_ends(trace: Trace) -> Iterator[RecordedMessage]:
    """The messages between stages whose sender and receiver have both recorded them."""
    ends: dict[tuple[object, ...], list[tuple[int, Event]]] = defaultdict(list)
    for rank, events in trace.events.items():
        if (events.stage >= 0).any():
            for row in events.of_kind(Kind.SEND, Kind.RECEIVE):
                if row.stage >= 0 and row.sequence >= 0:
                    ends[_key(rank, row)].append((rank, row))
    for both in ends.values():
        if Counter(row.kind for _, row in both) == {Kind.SEND: 1, Kind.RECEIVE: 1}:
            sent, received = sorted(both, key=lambda end: end[1].kind != Kind.SEND)
            yield RecordedMessage(*sent, *received)


def _key(rank: int, row: Event) -> tuple[object, ...]:
    sender, receiver = (rank, row.peer) if row.kind == Kind.SEND else (row.peer, rank)
    return row.group, sender, receiver, row.sequence, row.step


def _item(point: str, row: Event) -> Item:
    end = MessageEnd(row.kind == Kind.SEND, row.peer, row.group, row.sequence)
    return Item(
        point, row.kind, size_bytes=row.size_bytes, stage=row.stage, micro_batch=row.micro_batch, message=end
    )
