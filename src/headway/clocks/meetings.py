"""What members of different clocks did together: where one clock can be held against another."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.arrays import Flags, Indices, Ints
from headway.clocks.matching import Codes, Forms, Parts, mixed, parts_of
from headway.clocks.subsampling import subsample
from headway.trace.events import Events


@dataclass(frozen=True, slots=True, eq=False)
class Meetings:
    """What clocks saw of the same things. Columns: one row for each clock in a meeting; times are on its own clock.

    ``first_ns`` and ``last_ns`` say for each clock from when to when anything at all was recorded on it.
    """

    clocks: tuple[str, ...]
    first_ns: Ints
    last_ns: Ints
    meeting: Indices  # counts from 0; all rows of one meeting stand together
    clock: Indices  # of ``clocks``, in ascending order within a meeting
    company: (
        Indices  # a number for the clocks that take part in the meeting: the same where the same meet again
    )
    arrival_ns: Ints  # when the last of its members that others wait for had come
    end_ns: Ints  # when the first of its members that wait for others was through
    holds: Flags  # whether others wait for it
    waits: Flags  # whether it waits for others
    form: Forms  # of the meeting: TOGETHER, LOOSE, MESSAGE or ON_DEVICES

    def __len__(self) -> int:
        return len(self.meeting)


def meetings_of(
    events: Mapping[int, Events], clock_of_rank: Mapping[int, str], on_devices: Collection[int] = ()
) -> Meetings:
    """The meetings of clocks in the recordings of all ranks, each on its own clock.

    The collectives of the ranks ``on_devices`` are kernels, whose ends say more of clocks than those of calls.

    Of a long recording it takes some hundreds, spread over time and over those who met. No time of one clock is ever
    compared with one of another: what belongs together is known by name, number and order alone.
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
    """From when to when anything was recorded on each clock; 0 where nothing was."""
    farthest = np.iinfo(np.int64)
    first_ns, last_ns = np.full(clocks, farthest.max), np.full(clocks, farthest.min)
    for rank, own in events.items():
        clock = number[rank]
        first_ns[clock] = min(first_ns[clock], own.start_ns.min(initial=farthest.max))
        last_ns[clock] = max(last_ns[clock], own.end_ns.max(initial=farthest.min))
    some = first_ns <= last_ns
    return np.where(some, first_ns, 0), np.where(some, last_ns, 0)


def _met(parts: Parts, clock: Indices, names: tuple[str, ...], first_ns: Ints, last_ns: Ints) -> Meetings:
    """All meetings of several clocks, from parts in ascending order of their clocks."""
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
    each = np.repeat(np.arange(len(rows)), np.diff(np.append(rows, len(clock))))
    # Only those who hold others up count for an arrival, and only those who wait for an end, where there are such.
    farthest = np.iinfo(np.int64)
    arrival_ns = np.where(parts.holds | ~holds[each], parts.arrival_ns, farthest.min)
    end_ns = np.where(parts.waits | ~waits[each], parts.end_ns, farthest.max)
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
