"""Matches communication events across ranks: which events form one collective, and which rank arrived last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from headway.arrays import Flags, Ints, Texts
from headway.trace.events import Event, Kind, inner_messages, texts
from headway.trace.format import Trace


@dataclass(frozen=True, slots=True, eq=False)
class Communications:
    """The communication events of all ranks as columns, one row per event. Times are ns on rank 0's clock.

    Rows with the same ``instance`` are the members' views of one collective or message. ``arrival_ns`` is when its last
    recorded member (``last_rank``) called it, at most this row's end. Sends wait for their receiver only on devices.
    ``inner`` marks messages that are part of a recorded collective. ``members`` counts all participating ranks, recorded
    or not. ``next_rank`` is the ring neighbour that this row's rank sends to, or -1 if unknown.
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
        """The rows selected by ``mask`` (or by an array of indices)."""
        return Communications(**{field.name: getattr(self, field.name)[mask] for field in fields(self)})

    def of_rank(self, rank: int) -> Communications:
        """One rank's rows."""
        return self.where(self.rank == rank)


def match(trace: Trace, *, messages: bool = False) -> Communications:
    """Matches communication events across ranks: collectives by group, name and sequence, messages by order.

    Pushes with a sequence number are matched like collectives: a server that waits for all workers answers them
    together. Messages that are part of a collective are left out: their bytes would count twice, and a rank that waits
    for the collective's last member would seem to wait for messages. ``messages=True`` includes them, marked ``inner``.
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
    rank = _ints([member for member, _ in rows])
    start = _ints([event.start_ns for _, event in rows])
    end = _ints([event.end_ns for _, event in rows])
    enqueue = _ints([event.enqueue_ns for _, event in rows])
    enqueue = np.where(enqueue >= 0, np.minimum(enqueue, end), start)
    kind = texts([event.kind for _, event in rows])

    order = np.lexsort((enqueue, instance))  # the last row of each instance is its last arriver
    last = order[np.flatnonzero(np.diff(instance[order], append=-1) != 0)] if rows else order
    # A send kernel runs until its receiver arrives; a send on the CPU is done when the call returns.
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
    """The number of participating ranks and the ring neighbour of each row, from the group or else from the rows."""
    stated = {name: tuple(trace.manifest.groups.get(name, ())) for name in dict.fromkeys(group)}
    successor = {
        (name, member): following
        for name, ranks in stated.items()
        for member, following in zip(ranks, (*ranks[1:], *ranks[:1]), strict=True)
    }
    recorded: Ints = np.bincount(instance)[instance] if len(instance) else instance
    order = np.lexsort((rank, instance))
    first = np.searchsorted(instance[order], instance[order], side="left")
    following = np.arange(1, len(order) + 1)
    follows = np.append(np.diff(instance[order]) == 0, False) if len(order) else np.zeros(0, dtype=bool)
    neighbour = np.empty_like(rank)
    neighbour[order] = rank[order][np.where(follows, following, first)]
    keys = list(zip(group, rank.tolist(), strict=True))
    has_group = np.array([key in successor for key in keys], dtype=bool)
    members = np.array([len(stated[name]) for name in group], dtype=np.int64)
    named = np.array([successor.get(key, -1) for key in keys], dtype=np.int64)
    # Without a known group, the collective is taken to span all ranks; missing ranks have no known place in the ring.
    is_partial = len(trace.events) < trace.world_size
    members = np.where(has_group, members, trace.world_size if is_partial else recorded)
    next_rank = np.where(has_group, named, -1 if is_partial else neighbour)
    return np.where(collective, members, recorded), np.where(collective, next_rank, -1)


def _instances(rows: list[tuple[int, Event]], parts: list[bool]) -> Ints:
    """Numbers the instances from 0. Repeats of a key on one rank are distinguished by their order."""
    numbers: dict[tuple[object, ...], int] = {}
    seen: dict[tuple[object, ...], int] = {}
    instances = np.zeros(len(rows), dtype=np.int64)
    for row, ((rank, event), inner) in enumerate(zip(rows, parts, strict=True)):
        key: tuple[object, ...]
        if event.kind in (Kind.SEND, Kind.RECEIVE):
            ends = (rank, event.peer) if event.kind == Kind.SEND else (event.peer, rank)
            # Concurrent collectives issue their messages in a different order on each rank.
            whose = (event.name, event.sequence) if inner else ("", -1)
            key = ("message", event.group, *whose, *ends)
        elif event.sequence >= 0:
            key = (event.group, event.kind, event.name, event.sequence)
        else:
            key = ("alone", row)
        repeat = seen.get((rank, event.kind, key), 0)
        seen[rank, event.kind, key] = repeat + 1
        instances[row] = numbers.setdefault((*key, repeat), len(numbers))
    return instances


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)
