"""Derives events from observations: when collectives really started, and when computation waited for them."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headway.collectives.algorithms import ALL_REDUCE, COMPRESSED, GLOO_THREADS, SERVERS
from headway.collectives.live import Transfer
from headway.recording.collectives import CollectiveTap, ObservedCollective
from headway.recording.modules import ModuleWatch
from headway.recording.watch import Watch
from headway.trace.events import Event, Kind, Stream

WAITED_FOR_AT_THE_END = ("gloo", SERVERS, COMPRESSED)  # DDP waits for these at the end of a backward


@dataclass(slots=True)
class StrategySpan:
    """A span that a strategy's runtime reports; ``kind`` is collective, wait or update.

    ``strategy`` names the group of its collectives.
    """

    kind: str
    name: str
    bucket: int
    start_ns: int
    end_ns: int
    size_bytes: int = -1
    enqueue_ns: int = -1
    sequence: int = -1
    algorithm: str = ""
    step: int = 0
    stream: str = Stream.COMPUTE
    transfers: Sequence[Transfer] = ()
    strategy: str = ""


class CommunicationRows(Watch):
    """Keeps the spans that strategies report, and adds all collectives and their messages."""

    def __init__(self, tap: CollectiveTap) -> None:
        self.spans: list[StrategySpan] = []
        self._tap = tap

    def add_rows(self, rows: list[Event]) -> list[Event]:
        """Add the collectives that the tap observed and strategies reported, and the latter's messages."""
        return rows + collective_rows(self._tap.observed, self.spans) + transfer_rows(self.spans)


class WaitRows(Watch):
    """Adds waits and updates, which are derived from all other events."""

    def __init__(self, tap: CollectiveTap, modules: ModuleWatch, communication: CommunicationRows) -> None:
        self._tap, self._modules, self._communication = tap, modules, communication

    def add_rows(self, rows: list[Event]) -> list[Event]:
        """Add the main thread's waits, and the waits and updates that strategies reported."""
        ends_ns = self._modules.compute_ends_ns
        return rows + wait_rows(rows, self._tap.observed, ends_ns, self._communication.spans)


def collective_rows(observed: Iterable[ObservedCollective], spans: Iterable[StrategySpan]) -> list[Event]:
    """Events of all collectives. The all-reduces that a backward issues are numbered as buckets, from 0 in each step."""
    rows: list[Event] = []
    bucket_count: dict[int, int] = defaultdict(int)
    free_ns: dict[str, list[int]] = defaultdict(lambda: [0] * GLOO_THREADS)
    for seen in observed:
        if seen.end_ns == 0:
            continue
        bucket = -1
        if seen.phase == "backward" and seen.name == ALL_REDUCE and not seen.is_of_uses:
            bucket = bucket_count[seen.step]
            bucket_count[seen.step] += 1
        start_ns = max(seen.enqueue_ns, heapq.heappop(free_ns[seen.group]))
        start_ns = min(start_ns, seen.end_ns)
        heapq.heappush(free_ns[seen.group], seen.end_ns)
        rows.append(
            Event(
                Kind.COLLECTIVE,
                seen.name,
                Stream.COMMUNICATION,
                seen.step,
                start_ns,
                seen.end_ns - start_ns,
                enqueue_ns=seen.enqueue_ns,
                group=seen.group,
                sequence=seen.sequence,
                size_bytes=seen.size_bytes,
                bucket=bucket,
                algorithm="gloo",
            )
        )
    rows += [
        Event(
            Kind.COLLECTIVE,
            span.name,
            Stream.COMMUNICATION,
            span.step,
            span.start_ns,
            span.end_ns - span.start_ns,
            enqueue_ns=span.enqueue_ns,
            group=span.strategy,
            sequence=span.sequence,
            size_bytes=span.size_bytes,
            bucket=span.bucket,
            algorithm=span.algorithm,
        )
        for span in spans
        if span.kind == Kind.COLLECTIVE
    ]
    return rows


def transfer_rows(spans: Iterable[StrategySpan]) -> list[Event]:
    """Events of the messages inside a strategy's collectives, with the collective's name and sequence."""
    return [
        Event(
            Kind.SEND if transfer.sends else Kind.RECEIVE,
            span.name,
            Stream.COMMUNICATION,
            span.step,
            transfer.posted_ns,
            transfer.done_ns - transfer.posted_ns,
            enqueue_ns=transfer.posted_ns,
            group=span.strategy,
            sequence=span.sequence,
            size_bytes=transfer.size_bytes,
            bucket=span.bucket,
            peer=transfer.peer,
        )
        for span in spans
        for transfer in span.transfers
    ]


def wait_rows(
    rows: Iterable[Event],
    observed: Iterable[ObservedCollective],
    compute_ends_ns: Mapping[int, int],
    spans: Iterable[StrategySpan],
) -> list[Event]:
    """Events of the main thread's waits: for gradients after a backward, for its own collectives, for a strategy."""
    waits = []
    bucket_ends: dict[int, list[int]] = defaultdict(list)
    observed = list(observed)
    uses = {(c.group, c.sequence) for c in observed if c.is_of_uses}
    blocking = {
        (c.group, c.sequence)
        for c in observed
        if c.phase == "enter" or (not c.asynchronous and c.phase == "")
    }
    passes: list[Event] = []
    rows = list(rows)
    for row in rows:
        if row.kind == Kind.COLLECTIVE and (
            (row.bucket >= 0 and row.algorithm in WAITED_FOR_AT_THE_END) or (row.group, row.sequence) in uses
        ):
            bucket_ends[row.step].append(row.end_ns)
        elif row.kind == Kind.COLLECTIVE and (row.group, row.sequence) in blocking:
            waits.append(_span(Kind.WAIT, row.name, row.step, row.enqueue_ns, row.end_ns))
        elif row.kind == Kind.BACKWARD_PASS:
            passes.append(row)
    for row in passes:
        compute_end_ns = compute_ends_ns.get(row.end_ns, row.end_ns)
        ends = [end_ns for end_ns in bucket_ends[row.step] if compute_end_ns < end_ns]
        if ends:
            end_ns = min(max(ends), row.end_ns)
            waits.append(_span(Kind.WAIT, "gradients", row.step, compute_end_ns, end_ns))
    waits += [
        _span(span.kind, span.name, span.step, span.start_ns, span.end_ns)._replace(
            bucket=span.bucket, stream=span.stream
        )
        for span in spans
        if span.kind != Kind.COLLECTIVE
    ]
    return waits


def _span(kind: str, name: str, step: int, start_ns: int, end_ns: int) -> Event:
    return Event(kind, name, Stream.COMPUTE, step, start_ns, max(0, end_ns - start_ns))
