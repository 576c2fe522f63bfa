"""What one rank communicated, each piece under a key that is the same on all ranks that took part in it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.arrays import Flags, Ints, Texts
from headway.trace.events import Events, Kind

Keys = npt.NDArray[np.uint64]
Forms = npt.NDArray[np.int8]

TOGETHER, LOOSE, MESSAGE, ON_DEVICES = 0, 1, 2, 3
"""Forms: all members end together and after all have come; members end when they like; a send and its receive; kernels,
of which all members end together but for what a link's latency takes.
"""

MAX_OF_A_KIND = 10_000  # of one rank: of more, a part is looked at

_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
_FROM_ROOT = ("broadcast", "scatter")
_TO_ROOT = ("reduce", "gather")
_MESSAGE = "\0message"


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Ranks' parts in what they did together, as columns. Times are on each rank's own clock."""

    key: Keys
    form: Forms
    arrival_ns: Ints
    end_ns: Ints
    holds: Flags  # nobody who waits can have ended before this part began
    waits: Flags  # this part cannot have ended before all that hold others began

    def where(self, picked: Flags | npt.NDArray[np.intp]) -> Parts:
        """The parts that ``picked`` picks."""
        return Parts(**{field.name: getattr(self, field.name)[picked] for field in fields(self)})

    @classmethod
    def none(cls) -> Parts:
        """No parts."""
        times, flags = np.zeros(0, np.int64), np.zeros(0, np.bool_)
        return cls(np.zeros(0, np.uint64), np.zeros(0, np.int8), times, times, flags, flags)

    @classmethod
    def concatenated(cls, parts: list[Parts]) -> Parts:
        """All parts, one after another."""
        return cls(**{f.name: np.concatenate([getattr(one, f.name) for one in parts]) for f in fields(cls)})


class Codes:
    """Numbers for texts, the same for all ranks."""

    def __init__(self) -> None:
        self._numbers: defaultdict[str, int] = defaultdict(count().__next__)

    def of(self, texts: Texts) -> Ints:
        """The number of each text."""
        return np.fromiter(map(self._numbers.__getitem__, texts.tolist()), np.int64, len(texts))

    def one(self, text: str) -> int:
        """The number of one text."""
        return self._numbers[text]

    def among(self, codes: Ints, texts: tuple[str, ...]) -> Flags:
        """Which codes are of one of ``texts``."""
        found: Flags = np.isin(codes, [self._numbers[text] for text in texts])
        return found


def parts_of(events: Events, rank: int, codes: Codes, *, on_device: bool = False) -> Parts:
    """The parts of ``rank``, whose collectives are kernels where they are ``on_device``.

    Collectives are known by group, name and sequence, messages by group, both ends and order.

    Where a sequence is missing or stands twice, the order within its step counts, provided that all took as many parts
    in that step: otherwise it is not known whose is whose. A root is known where ``peer`` names it. Numbered pushes to
    a parameter server are answered when all workers' have come, as an all-reduce is done then.
    """
    pushed = (events.kind == Kind.PUSH) & (events.sequence >= 0)
    collective = (events.kind == Kind.COLLECTIVE) | pushed
    sent = events.kind == Kind.SEND
    picked = np.flatnonzero(collective | sent | (events.kind == Kind.RECEIVE))
    collective, sent, pushed, peer = collective[picked], sent[picked], pushed[picked], events.peer[picked]
    name, sequence = codes.of(events.name[picked]), events.sequence[picked]
    together = codes.among(name, _TOGETHER) | pushed
    # A message of a collective carries its name and number; others are counted by each end as it likes.
    stated = collective | (together & (sequence >= 0))
    name, sequence = np.where(stated, name, codes.one(_MESSAGE)), np.where(stated, sequence, -1)
    together &= collective
    source = np.where(collective, -1, np.where(sent, rank, peer))
    target = np.where(collective, -1, np.where(sent, peer, rank))
    start_ns = events.start_ns[picked]
    issued_ns = np.where(events.enqueue_ns[picked] >= 0, events.enqueue_ns[picked], start_ns)
    kind = mixed(name, codes.of(events.group[picked]), source, target)
    rooted = collective & (peer >= 0)
    from_root, to_root = codes.among(name, _FROM_ROOT) & rooted, codes.among(name, _TO_ROOT) & rooted
    root = peer == rank
    parts = Parts(
        key=_numbered(mixed(kind, sequence), sequence, events.step[picked], issued_ns),
        form=np.where(
            collective, np.where(together, ON_DEVICES if on_device else TOGETHER, LOOSE), MESSAGE
        ).astype(np.int8),
        arrival_ns=start_ns,
        end_ns=start_ns + np.maximum(events.duration_ns[picked], 0),
        holds=together | (from_root & root) | (to_root & ~root) | sent,
        waits=together | (from_root & ~root) | (to_root & root) | (~collective & ~sent),
    )
    return parts.where(_few(parts.key, kind))


def _few(key: Keys, kind: Keys) -> Flags:
    """A part of the keys of each kind, so that there are not too many: on all ranks the same, or a part of the same."""
    _, number, counted = np.unique(kind, return_inverse=True, return_counts=True)
    halvings = np.ceil(np.log2(np.maximum(counted / MAX_OF_A_KIND, 1))).astype(np.uint64)
    few: Flags = key & ((np.uint64(1) << halvings) - np.uint64(1))[number] == 0
    return few


def mixed(*columns: npt.NDArray[Any]) -> Keys:
    """One number for each row of integers: the same for equal rows, and hardly ever (once in 2^64) for others."""
    key = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        key = (key ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        key = (key ^ (key >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
        key ^= key >> np.uint64(29)
    return key


def _numbered(key: Keys, sequence: Ints, step: Ints, issued_ns: Ints) -> Keys:
    """Keys of which none stands twice: those that would are told apart by step, by order and by how many there are."""
    _, number, counted = np.unique(key, return_inverse=True, return_counts=True)
    again = np.flatnonzero((counted[number] > 1) | (sequence < 0))
    if not len(again):
        return key
    in_step = mixed(key[again], step[again])
    order = np.lexsort((issued_ns[again], in_step))
    first = np.flatnonzero(np.diff(in_step[order], prepend=~in_step[order[:1]]))
    lengths = np.diff(np.append(first, len(order)))
    occurrence, length = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
    occurrence[order] = np.arange(len(order)) - np.repeat(first, lengths)
    length[order] = np.repeat(lengths, lengths)
    numbered = key.copy()
    numbered[again] = mixed(in_step, occurrence, length)
    return numbered
