"""Finds the meetings of clocks: collectives and messages between ranks, by which clocks can be compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.arrays import Flags, Indices, Ints, Texts
from headway.trace.events import Events, Kind

Keys = npt.NDArray[np.uint64]
Forms = npt.NDArray[np.int8]

TOGETHER, LOOSE, MESSAGE, ON_DEVICES = 0, 1, 2, 3
"""Forms of meetings. TOGETHER: all members end together, after all have arrived; LOOSE: members end independently;
MESSAGE: a send and its receive; ON_DEVICES: kernels, whose members end together except for a link's latency.
"""

MAX_OF_A_KIND = 10_000  # of one rank; of more, only a part is used

_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
_FROM_ROOT = ("broadcast", "scatter")
_TO_ROOT = ("reduce", "gather")
_MESSAGE = "\0message"


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Ranks' parts in collectives and messages, as columns. Times are on each rank's own clock."""

    key: Keys
    form: Forms
    arrival_ns: Ints
    end_ns: Ints
    holds: Flags  # no waiting part can end before this part begins
    waits: Flags  # this part cannot end before all holding parts have begun

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
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)})


class Codes:
    """Numbers strings consistently across ranks."""

    def __init__(self) -> None:
        self._numbers: defaultdict[str, int] = defaultdict(count().__next__)

    def of(self, texts: Texts) -> Ints:
        """The number of each text."""
        return np.fromiter(map(self._numbers.__getitem__, texts.tolist()), np.int64, len(texts))

    def number(self, text: str) -> int:
        """The number of one text."""
        return self._numbers[text]

    def among(self, codes: Ints, texts: tuple[str, ...]) -> Flags:
        """Which codes are of one of ``texts``."""
        matches: Flags = np.isin(codes, [self._numbers[text] for text in texts])
        return matches


def parts_of(events: Events, rank: int, codes: Codes, *, on_device: bool = False) -> Parts:
    """The parts of ``rank`` in collectives and messages. ``on_device``: its collectives are kernels.

    Collectives are matched by group, name and sequence, messages by group, both ends and order.

    If a sequence is missing or repeated, collectives are matched by their order within the step, provided that all
    members have equally many in that step. The root is known if ``peer`` names it. Numbered pushes to a parameter
    server count as an all-reduce: they are answered when all workers' pushes have arrived.
    """
    pushed = (events.kind == Kind.PUSH) & (events.sequence >= 0)
    collective = (events.kind == Kind.COLLECTIVE) | pushed
    sent = events.kind == Kind.SEND
    picked = np.flatnonzero(collective | sent | (events.kind == Kind.RECEIVE))
    collective, sent, pushed, peer = collective[picked], sent[picked], pushed[picked], events.peer[picked]
    name, sequence = codes.of(events.name[picked]), events.sequence[picked]
    together = codes.among(name, _TOGETHER) | pushed
    # A message inside a collective carries its name and number; the sequence of any other may differ at its two ends.
    stated = collective | (together & (sequence >= 0))
    name, sequence = np.where(stated, name, codes.number(_MESSAGE)), np.where(stated, sequence, -1)
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
    """Select some keys of each kind if there are too many; ranks select the same keys, or subsets of the same."""
    _, number, counted = np.unique(kind, return_inverse=True, return_counts=True)
    halvings = np.ceil(np.log2(np.maximum(counted / MAX_OF_A_KIND, 1))).astype(np.uint64)
    few: Flags = key & ((np.uint64(1) << halvings) - np.uint64(1))[number] == 0
    return few


def mixed(*columns: npt.NDArray[Any]) -> Keys:
    """A 64-bit hash of each row of integers."""
    key = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        key = (key ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        key = (key ^ (key >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
        key ^= key >> np.uint64(29)
    return key


def _numbered(key: Keys, sequence: Ints, step: Ints, issued_ns: Ints) -> Keys:
    """Make keys unique: repeated ones are distinguished by step, by order in it, and by how many it has."""
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


MAX_MEETINGS = 1_000
MAX_ROWS = 30_000
MAX_CLOCKS = 32  # in one meeting; of larger ones some clocks are used, in turn
FASTER_SHARE = 0.1  # the quantile of durations at which a meeting is picked


def subsample(meetings: Meetings) -> Meetings:
    """Reduce the meetings to at most about MAX_MEETINGS and MAX_ROWS rows.

    Meetings are grouped by their clocks and the clock that arrived last. From each stretch of time, one short meeting
    of each group is kept: the shorter, the more precise. The very shortest is skipped as a possible outlier.
    """
    if not len(meetings):
        return meetings
    first = np.flatnonzero(np.diff(meetings.meeting, prepend=-1))
    clocks = np.diff(np.append(first, len(meetings)))
    if len(first) <= MAX_MEETINGS and len(meetings) <= MAX_ROWS:
        return meetings
    _, kind, counted = np.unique(_kind(meetings, first), return_inverse=True, return_counts=True)
    # Times of one kind are on one clock.
    began_ns = np.full(len(counted), np.iinfo(np.int64).max)
    np.minimum.at(began_ns, kind, meetings.end_ns[first])
    since_ns = (meetings.end_ns[first] - began_ns[kind]).astype(np.float64)
    longest_ns = np.zeros(len(counted))
    np.maximum.at(longest_ns, kind, since_ns)
    stretches = _stretches(counted, np.minimum(clocks, MAX_CLOCKS).mean())
    place = since_ns / (longest_ns[kind] + 1) * stretches[kind]
    stretch = np.clip(place, 0, stretches[kind] - 1).astype(np.intp)
    order = np.lexsort((_took_ns(meetings, first), stretch, kind))
    cells = np.flatnonzero(np.diff(kind[order], prepend=-1) | np.diff(stretch[order], prepend=-1))
    filled = np.diff(np.append(cells, len(order)))
    picked = np.zeros(len(first), dtype=bool)
    picked[order[cells + (filled * FASTER_SHARE).astype(np.intp)]] = True
    return _only(meetings, picked, clocks, _last_row(meetings, first))


def _took_ns(meetings: Meetings, first: Indices) -> Ints:
    """How long each meeting took after all had arrived, by the clock of the last to arrive.

    For a message: from the send on one clock to its end on the other, to compare only with others of its kind.
    """
    own_ns = np.maximum(meetings.end_ns - meetings.arrival_ns, 0)
    least_ns: Ints = np.minimum.reduceat(own_ns, first)
    message = meetings.form[first] == MESSAGE
    sender = first[message] + ~meetings.holds[first[message]]
    receiver = first[message] + meetings.holds[first[message]]
    least_ns[message] = meetings.end_ns[receiver] - meetings.arrival_ns[sender]
    return least_ns


def _last_row(meetings: Meetings, first: Indices) -> Indices:
    """The row of the clock that waited least in each meeting: the last to arrive, or the sender."""
    own_ns = np.maximum(meetings.end_ns - meetings.arrival_ns, 0)
    order = np.lexsort((own_ns, ~meetings.holds, meetings.meeting))
    return order[first]


def _kind(meetings: Meetings, first: Indices) -> npt.NDArray[np.uint64]:
    last = meetings.clock[_last_row(meetings, first)]
    return mixed(meetings.company[first], last, meetings.form[first])


def _stretches(counted: Indices, clocks: float) -> Ints:
    """The number of time stretches for each kind that keeps the total number of meetings within the limits."""
    fair = min(MAX_MEETINGS, MAX_ROWS / clocks) / len(counted)
    rare = counted <= fair
    if not rare.all():  # the rest of the limit goes to the frequent kinds
        fair = max(0.0, fair * len(counted) - counted[rare].sum()) / (~rare).sum()
    stretches: Ints = np.where(rare, 64 * counted, np.maximum(1, fair)).astype(np.int64)
    return stretches


def _only(meetings: Meetings, picked: npt.NDArray[np.bool_], clocks: Indices, last: Indices) -> Meetings:
    number = np.cumsum(picked) - 1
    place = np.arange(len(meetings)) + number[meetings.meeting]
    kept = place % -(-clocks // MAX_CLOCKS)[meetings.meeting] == 0
    kept[last] = True
    rows = picked[meetings.meeting] & kept
    columns = ("clock", "company", "arrival_ns", "end_ns", "holds", "waits", "form")
    return replace(
        meetings,
        meeting=number[meetings.meeting[rows]],
        **{name: getattr(meetings, name)[rows] for name in columns},
    )


@dataclass(frozen=True, slots=True, eq=False)
class Meetings:
    """Meetings of clocks as columns: one row for each clock in each meeting. Times are on the row's own clock.

    ``first_ns`` and ``last_ns`` are each clock's first and last recorded times.
    """

    clocks: tuple[str, ...]
    first_ns: Ints
    last_ns: Ints
    meeting: Indices  # numbered from 0; rows of one meeting are adjacent
    clock: Indices  # index into ``clocks``, ascending within a meeting
    company: Indices  # identifies the set of clocks that take part
    arrival_ns: Ints  # when the last of the clock's holding members arrived
    end_ns: Ints  # when the first of the clock's waiting members ended
    holds: Flags  # whether others wait for this clock's members
    waits: Flags  # whether this clock's members wait for others
    form: Forms  # of the meeting: TOGETHER, LOOSE, MESSAGE or ON_DEVICES

    def __len__(self) -> int:
        return len(self.meeting)


def meetings_of(
    events: Mapping[int, Events], clock_of_rank: Mapping[int, str], on_devices: Collection[int] = ()
) -> Meetings:
    """Find the meetings of clocks in the recordings of all ranks, each on its own clock.

    ``on_devices`` are ranks whose collectives are kernels: their ends are more precise than those of calls.

    From a long recording, some hundreds of meetings are kept, spread over time and pairs of clocks. Times of different
    clocks are never compared: meetings are matched by name, number and order alone.
    """
    names = tuple(dict.fromkeys(clock_of_rank[rank] for rank in sorted(events)))
    index = {name: number for number, name in enumerate(names)}
    number = {rank: index[clock_of_rank[rank]] for rank in events}
    codes = Codes()
    parts, clock = [Parts.none()], [np.zeros(0, dtype=np.intp)]
    for rank in sorted(events, key=lambda rank: (number[rank], rank)):
        parts.append(parts_of(events[rank], rank, codes, on_device=rank in on_devices))
        clock.append(np.full(len(parts[-1].key), number[rank], dtype=np.intp))
    first_ns, last_ns = _recorded(events, number, len(names))
    return subsample(_met(Parts.concatenated(parts), np.concatenate(clock), names, first_ns, last_ns))


def _recorded(events: Mapping[int, Events], number: Mapping[int, int], clocks: int) -> tuple[Ints, Ints]:
    """The first and last recorded times of each clock; 0 if it has none."""
    farthest = np.iinfo(np.int64)
    first_ns, last_ns = np.full(clocks, farthest.max), np.full(clocks, farthest.min)
    for rank, event in events.items():
        clock = number[rank]
        first_ns[clock] = min(first_ns[clock], event.start_ns.min(initial=farthest.max))
        last_ns[clock] = max(last_ns[clock], event.end_ns.max(initial=farthest.min))
    some = first_ns <= last_ns
    return np.where(some, first_ns, 0), np.where(some, last_ns, 0)


def _met(parts: Parts, clock: Indices, names: tuple[str, ...], first_ns: Ints, last_ns: Ints) -> Meetings:
    """All meetings of at least two clocks, from parts in ascending order of their clocks."""
    order = np.argsort(parts.key, kind="stable")
    parts, clock = parts.where(order), clock[order]
    starts = _changes(parts.key)
    lengths = np.diff(np.append(starts, len(clock)))
    several = np.repeat(clock[starts] != clock[starts + lengths - 1], lengths)
    parts, clock = parts.where(several), clock[several]
    if not len(clock):
        return Meetings(
            names, first_ns, last_ns, clock, clock, clock, parts.arrival_ns, parts.end_ns, parts.holds, parts.waits,
            parts.form,
        )  # fmt: skip
    new_meeting = np.zeros(len(clock), dtype=bool)
    new_meeting[_changes(parts.key)] = True
    rows = np.flatnonzero(new_meeting | (np.diff(clock, prepend=-1) != 0))
    holds, waits = np.logical_or.reduceat(parts.holds, rows), np.logical_or.reduceat(parts.waits, rows)
    row_of_part = np.repeat(np.arange(len(rows)), np.diff(np.append(rows, len(clock))))
    # If a clock has holding members, only they count for its arrival; likewise waiting members for its end.
    farthest = np.iinfo(np.int64)
    arrival_ns = np.where(parts.holds | ~holds[row_of_part], parts.arrival_ns, farthest.min)
    end_ns = np.where(parts.waits | ~waits[row_of_part], parts.end_ns, farthest.max)
    meeting = np.cumsum(new_meeting)[rows] - 1
    members = np.add.reduceat(mixed(clock[rows]), np.flatnonzero(np.diff(meeting, prepend=-1)))
    return Meetings(
        clocks=names,
        first_ns=first_ns,
        last_ns=last_ns,
        meeting=meeting,
        clock=clock[rows],
        company=np.unique(members, return_inverse=True)[1][meeting],
        arrival_ns=np.maximum.reduceat(arrival_ns, rows),
        end_ns=np.minimum.reduceat(end_ns, rows),
        holds=holds,
        waits=waits,
        form=parts.form[rows],
    )


def _changes(key: npt.NDArray[np.uint64]) -> Indices:
    """Where each run of equal keys starts."""
    if not len(key):
        return np.zeros(0, dtype=np.intp)
    return np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
