"""Communication seen from all ranks at once: which events are one collective, and which rank arrived last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from headway.arrays import Flags, Ints, Texts
from headway.trace.events import Event, Kind, inner_messages, texts
from headway.trace.format import Trace


@dataclass(frozen=True, slots=True, eq=False)
class Communications:
    """Every rank's communication events as columns, one row per event.

    Rows of one ``instance`` are the members' views of one collective (or of one message). ``arrival_ns`` is when
    its last member asked for it, at most this row's end; ``last_rank`` is that member. A rank that did
    not record the collective cannot be waited for. A send waits for its receiver on devices only. ``inner`` marks the
    messages that a recorded collective of their rank consists of. ``members`` counts the ranks that take part,
    recorded or not; ``next_rank`` is the one after this row's rank among them, to which a ring sends, or -1 where it
    is not known.
    """

    rank: Ints
    kind: Texts
    name: Texts
    group: Texts
    sequence: Ints
    step: Ints
    bucket: Ints
    size_bytes: Ints
    peer: Ints
    enqueue_ns: Ints
    start_ns: Ints
    end_ns: Ints
    instance: Ints
    arrival_ns: Ints
    last_rank: Ints
    inner: Flags
    members: Ints
    next_rank: Ints

    def __len__(self) -> int:
        return len(self.rank)

    def where(self, mask: Flags | Ints) -> Communications:
        """The rows that ``mask`` (or an array of indices) picks."""
        return Communications(**{field.name: getattr(self, field.name)[mask] for field in fields(self)})

    def of_rank(self, rank: int) -> Communications:
        """One rank's rows."""
        return self.where(self.rank == rank)


def match(trace: Trace, *, messages: bool = False) -> Communications:
    """Match communication events across ranks: collectives by group, name and sequence; messages by order.

    Pushes to parameter servers that have a sequence are matched like collectives: a server that waits for all workers
    answers them together.

    A collective is one thing, whatever carries it out: the messages that it consists of are left out, as otherwise a
    rank that waits for its last member would seem to wait for its messages, and its bytes would count twice. With
    ``messages`` they are included, and marked ``inner``.
    """
    rows: list[tuple[int, Event]] = []
    parts: list[bool] = []
    for member, events in sorted(trace.events.items()):
        inner = inner_messages(events)
        wanted = np.isin(events.kind, [Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE, Kind.PUSH, Kind.PULL])
        if not messages:
            wanted &= ~inner
        rows.extend((member, event) for event in events.where(wanted))
        parts.extend(inner[wanted].tolist())
    instance = _instances(rows, parts)
    rank = _ints([one for one, _ in rows])
    start = _ints([event.start_ns for _, event in rows])
    end = _ints([event.end_ns for _, event in rows])
    enqueue = _ints([event.enqueue_ns for _, event in rows])
    enqueue = np.where(enqueue >= 0, np.minimum(enqueue, end), start)
    kind = texts([event.kind for _, event in rows])

    order = np.lexsort((enqueue, instance))  # the last row of each instance is its last arriver
    last = order[np.flatnonzero(np.diff(instance[order], append=-1) != 0)] if rows else order
    # A kernel that sends lasts until its receiver has come; whoever sends by a call is done when that returns.
    meets = all("ccl" in info.backend.lower() for info in trace.manifest.ranks)
    sends = (kind == Kind.SEND) & (not meets)
    members, next_rank = _rings(
        trace, rank, [event.group for _, event in rows], instance, kind == Kind.COLLECTIVE
    )
    return Communications(
        rank=rank,
        kind=kind,
        name=texts([event.name for _, event in rows]),
        group=texts([event.group for _, event in rows]),
        sequence=_ints([event.sequence for _, event in rows]),
        step=_ints([event.step for _, event in rows]),
        bucket=_ints([event.bucket for _, event in rows]),
        size_bytes=np.maximum(_ints([event.size_bytes for _, event in rows]), 0),
        peer=_ints([event.peer for _, event in rows]),
        enqueue_ns=enqueue,
        start_ns=np.maximum(start, enqueue),
        end_ns=end,
        instance=instance,
        arrival_ns=np.where(sends, enqueue, np.minimum(enqueue[last][instance], end)),
        last_rank=np.where(sends, rank, rank[last][instance]),
        inner=np.array(parts, dtype=bool),
        members=members,
        next_rank=next_rank,
    )


def _rings(
    trace: Trace, rank: Ints, group: Sequence[str], instance: Ints, collective: Flags
) -> tuple[Ints, Ints]:
    """For each row how many ranks take part, and which comes after its own: by the group, or by who recorded it."""
    stated = {name: tuple(trace.manifest.groups.get(name, ())) for name in dict.fromkeys(group)}
    after = {
        (name, one): following
        for name, ranks in stated.items()
        for one, following in zip(ranks, (*ranks[1:], *ranks[:1]), strict=True)
    }
    recorded: Ints = np.bincount(instance)[instance] if len(instance) else instance
    order = np.lexsort((rank, instance))
    first = np.searchsorted(instance[order], instance[order], side="left")
    following = np.arange(1, len(order) + 1)
    follows = np.append(np.diff(instance[order]) == 0, False) if len(order) else np.zeros(0, dtype=bool)
    beside = np.empty_like(rank)
    beside[order] = rank[order][np.where(follows, following, first)]
    keys = list(zip(group, rank.tolist(), strict=True))
    known = np.array([key in after for key in keys], dtype=bool)
    members = np.array([len(stated[name]) for name in group], dtype=np.int64)
    named = np.array([after.get(key, -1) for key in keys], dtype=np.int64)
    # A collective of no known group is one of all ranks; of the missing ones nobody knows where they stand in it.
    alone = len(trace.events) < trace.world_size
    members = np.where(known, members, trace.world_size if alone else recorded)
    next_rank = np.where(known, named, -1 if alone else beside)
    return np.where(collective, members, recorded), np.where(collective, next_rank, -1)


def _instances(rows: list[tuple[int, Event]], parts: list[bool]) -> Ints:
    """Number the instances from 0. Repeats of one key on one rank are told apart by their order."""
    numbers: dict[tuple[object, ...], int] = {}
    seen: dict[tuple[object, ...], int] = {}
    found = np.zeros(len(rows), dtype=np.int64)
    for row, ((rank, event), inner) in enumerate(zip(rows, parts, strict=True)):
        key: tuple[object, ...]
        if event.kind in (Kind.SEND, Kind.RECEIVE):
            ends = (rank, event.peer) if event.kind == Kind.SEND else (event.peer, rank)
            # Collectives that go on at the same time ask for their messages in an order of each rank's own.
            whose = (event.name, event.sequence) if inner else ("", -1)
            key = ("message", event.group, *whose, *ends)
        elif event.sequence >= 0:
            key = (event.group, event.kind, event.name, event.sequence)
        else:
            key = ("alone", row)
        repeat = seen.get((rank, event.kind, key), 0)
        seen[rank, event.kind, key] = repeat + 1
        found[row] = numbers.setdefault((*key, repeat), len(numbers))
    return found


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)
