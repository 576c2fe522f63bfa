"""A Horovod timeline as the communication of every rank that it tells of.

Rank 0 writes it, by its own clock: of other ranks it knows when rank 0 learned that they had asked for a tensor. What
is done for a tensor is timed on rank 0 and taken to be alike on all. No computation is recorded. Of a tensor whose
answer Horovod has cached it is only known when the first rank asked for it and when all had.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.ext import (
    MAX_EVENTS,
    Companion,
    Document,
    Events,
    ForeignRank,
    Kind,
    Reading,
    Stream,
    damaged,
    texts,
)
from headway_readers.horovod.table import Table, tabulated
from headway_readers.horovod.timeline import START, Timeline, read_timeline

GROUP = "horovod"
_ROWS_AN_EVENT = 100  # of the document, at most, whatever number of ranks it tells of

NOTHING_COMPUTED = (
    "A Horovod timeline records no computation: what precedes a step's requests is not known, and a rank is assumed to "
    "wait from its last request in a step to the end of the step's last collective."
)
ONE_CLOCK = (
    "Rank 0 timed all ranks: requests are known to one cycle of Horovod, and collectives as rank 0 ran them."
)
NO_CYCLES = (
    "Cycles are not marked: rank 0's requests seem earlier than others' of the same cycle. Record with "
    "HOROVOD_TIMELINE_MARK_CYCLES=1."
)
CACHED = (
    "For {0} of {1} collectives it is unknown which rank arrived last, as Horovod had cached the answer: all ranks are "
    "assumed to have arrived together. Record with HOROVOD_CACHE_CAPACITY=0."
)
ONE_STEP = "No tensor is reduced twice: everything is taken for one step."


def recognises(name: str, head: bytes) -> bool:
    """Whether a document that begins with ``head`` is a timeline of Horovod."""
    return head.lstrip().startswith(b"[") and (START.encode() in head or b'"NEGOTIATE_' in head)


def read(document: Document, companions: Sequence[Companion] = ()) -> Reading:
    """Read a timeline as one recording a rank. Raises TraceError where it is damaged or holds no collective."""
    timeline = read_timeline(document)
    if not timeline.collectives:
        raise damaged(document, "no collective that ended", expected="a Horovod timeline")
    table = tabulated(timeline)
    ranks, notes = _kept_ranks(table, document)
    notes = [*timeline.notes, *_notes(timeline, table), *notes]
    backends = [name for name in table.algorithm.tolist() if name]
    return Reading(
        ranks=[
            ForeignRank(
                source=document.name,
                framework="horovod",
                events=_events(table, rank),
                rank=rank,
                world_size=max(table.ranks) + 1 if len(table.ranks) > 1 else None,
                backend=backends[0] if backends else "",
                clock=f"horovod {document.name}",
                absolute=timeline.begin_ns >= 0,
                dropped_events=timeline.dropped,
                notes=notes,
            )
            for rank in ranks
        ]
    )


def _kept_ranks(table: Table, document: Document) -> tuple[list[int], list[str]]:
    """The ranks that the document names, no more of them than its size allows."""
    rows = 4 * len(table) + len(table.request_collective)
    most = max(1, min(MAX_EVENTS, _ROWS_AN_EVENT * (10_000 + len(document.data) // 50)) // rows)
    if len(table.ranks) <= most:
        return table.ranks, []
    note = f"The first {most} of {len(table.ranks)} ranks were kept: the recording of all is too large."
    return table.ranks[:most], [note]


def _notes(timeline: Timeline, table: Table) -> list[str]:
    notes = [NOTHING_COMPUTED, ONE_CLOCK]
    if not len(timeline.cycles_ns):
        notes.append(NO_CYCLES)
    if cached := int((table.told == 0).sum()):
        notes.append(CACHED.format(cached, len(table)))
    if len(table.step_start_ns) < 2:
        notes.append(ONE_STEP)
    if timeline.unfinished:
        notes.append(f"{timeline.unfinished} requests had not been answered when the recording ended.")
    return notes


def _events(table: Table, rank: int) -> Events:
    asked_ns = table.asked_ns(rank)
    own = asked_ns >= 0
    requests, arrival_ns = table.requests_of(rank)
    ready = table.bucket[table.request_collective[requests]] >= 0
    requests, arrival_ns = requests[ready], arrival_ns[ready]
    of = table.request_collective[requests]
    steps = np.arange(len(table.step_start_ns))
    wait_ns = np.full(len(steps), -1, dtype=np.int64)
    counted = own & (table.step >= 0)
    np.maximum.at(wait_ns, table.step[counted], asked_ns[counted])
    waits = (wait_ns >= 0) & (wait_ns < table.step_end_ns)
    return Events.concatenated(
        [
            Events.from_columns(
                kind=Kind.STEP, stream=Stream.COMPUTE, name=texts([f"step {step}" for step in steps.tolist()]),
                step=steps, start_ns=table.step_start_ns, duration_ns=table.step_end_ns - table.step_start_ns,
            ),
            Events.from_columns(
                kind=Kind.COLLECTIVE, stream=Stream.COMMUNICATION, name=table.name[own], step=table.step[own],
                start_ns=table.start_ns[own], duration_ns=(table.end_ns - table.start_ns)[own],
                enqueue_ns=asked_ns[own], group=GROUP, sequence=np.flatnonzero(own),
                size_bytes=table.size_bytes[own], bucket=table.bucket[own], algorithm=table.algorithm[own],
            ),
            Events.from_columns(
                kind=Kind.GRADIENT_READY, stream=Stream.COMPUTE, name=table.tensor[requests], step=table.step[of],
                start_ns=arrival_ns, bucket=table.bucket[of],
            ),
            Events.from_columns(
                kind=Kind.WAIT, stream=Stream.COMPUTE, name="gradients", step=steps[waits],
                start_ns=wait_ns[waits], duration_ns=(table.step_end_ns - wait_ns)[waits],
            ),
        ]
    )  # fmt: skip
