"""One rank's recording as a graph: what it computed, what it communicated, and what each of it waited for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from headway.diagnosis.timeline import REST, Segment, segments
from headway.trace.events import Event, Events, Kind
from headway.trace.messages import inner_messages

TOLERANCE_NS = 200_000  # who waits may be seen to go on a little before what he waits for is seen to end
_PLAIN = {Kind.FORWARD_PASS: Kind.FORWARD, Kind.BACKWARD_PASS: Kind.BACKWARD}


@dataclass(eq=False)
class Computed:
    """A stretch of computation."""

    start_ns: int
    end_ns: int
    kind: str  # of an event, or REST
    name: str
    bucket: int
    needs: list[Computed | Communicated] = field(default_factory=list)


@dataclass(eq=False)
class Communicated:
    """A collective or message. It was asked for when what it needs had ended."""

    event: Event
    needs: list[Computed | Communicated] = field(default_factory=list)

    @property
    def asked_ns(self) -> int:
        """When this rank asked for it."""
        return min(self.event.enqueue_ns, self.start_ns) if self.event.enqueue_ns >= 0 else self.start_ns

    @property
    def start_ns(self) -> int:
        """When it started on this rank."""
        return self.event.start_ns

    @property
    def end_ns(self) -> int:
        """When it ended on this rank."""
        return self.event.end_ns


Piece = Computed | Communicated


def graph_of(events: Events, start_ns: int, end_ns: int) -> list[Piece]:
    """What a rank did from ``start_ns`` to ``end_ns``, ordered by start; nothing needs what begins after it.

    Computation runs in sequence and is cut where communication was asked for; after a wait it needs what was awaited.
    """
    communicated = [Communicated(event) for event in _communication(events, start_ns, end_ns)]
    by_end = sorted(communicated, key=lambda one: one.end_ns)
    computed: list[Computed] = []
    awaited: list[Communicated] = []  # since the last computation
    waited_for: list[Communicated] = []  # ever
    for stretch in _cut(segments(events, start_ns, end_ns), sorted({one.asked_ns for one in communicated})):
        if stretch.kind == Kind.WAIT:
            found = _awaited(stretch, by_end)
            awaited += found
            waited_for += found
            went_on_ns = max((one.end_ns for one in found), default=stretch.start_ns)
            if went_on_ns >= stretch.end_ns:
                continue
            stretch = Segment(went_on_ns, stretch.end_ns, REST, stretch.name)
        kind = _PLAIN.get(stretch.kind, stretch.kind)
        needs: list[Piece] = [*computed[-1:], *awaited]
        computed.append(Computed(stretch.start_ns, stretch.end_ns, kind, stretch.name, stretch.bucket, needs))
        awaited = []
    _ask(communicated, computed, sorted(waited_for, key=lambda one: one.end_ns))
    everything: list[Piece] = [*computed, *communicated]
    return sorted(everything, key=lambda piece: piece.start_ns)


def _communication(events: Events, start_ns: int, end_ns: int) -> Iterator[Event]:
    """Collectives, and messages that are no part of one."""
    whole = events.where(~inner_messages(events))
    for row in whole.of_kind(Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE):
        asked_ns = row.enqueue_ns if row.enqueue_ns >= 0 else row.start_ns
        if asked_ns < end_ns and row.end_ns > start_ns:
            yield row


def _cut(stretches: Iterable[Segment], cuts: Sequence[int]) -> Iterator[Segment]:
    """Computation in pieces, none of which goes on beyond the moment at which communication was asked for."""
    for stretch in stretches:
        begin = stretch.start_ns
        if stretch.kind != Kind.WAIT:
            for at in cuts[bisect_right(cuts, begin) : bisect_left(cuts, stretch.end_ns)]:
                yield stretch._replace(start_ns=begin, end_ns=at)
                begin = at
        yield stretch._replace(start_ns=begin)


def _awaited(wait: Segment, by_end: Sequence[Communicated]) -> list[Communicated]:
    """What ended during a wait: of that, what carries the wait's bucket, where that is known."""
    first = bisect_right(by_end, wait.start_ns, key=_end)
    last = bisect_right(by_end, wait.end_ns + TOLERANCE_NS, key=_end)
    ended = [one for one in by_end[first:last] if one.asked_ns < wait.end_ns and one.start_ns < wait.end_ns]
    return [one for one in ended if one.event.bucket >= 0 and one.event.bucket == wait.bucket] or ended


def _ask(
    communicated: Iterable[Communicated], computed: Sequence[Computed], waited_for: Sequence[Communicated]
) -> None:
    """Say what each communication needs: what was computed until it was asked for, and what its queue did before."""
    before: dict[tuple[object, ...], Communicated] = {}
    for one in communicated:
        asked_ns = one.asked_ns
        at = bisect_right(computed, asked_ns, key=_end)
        until_ns = computed[at - 1].end_ns if at else asked_ns
        since = waited_for[
            bisect_right(waited_for, until_ns, key=_end) : bisect_right(waited_for, asked_ns, key=_end)
        ]
        one.needs = [*computed[at - 1 : at], *since] if at else []
        event = one.event
        queue = (event.group, event.kind, event.peer if event.kind != Kind.COLLECTIVE else -1)
        previous = before.get(queue)
        if previous is not None and previous.end_ns <= one.start_ns and previous not in one.needs:
            one.needs.append(previous)
        before[queue] = one


def _end(piece: Piece) -> int:
    return piece.end_ns
