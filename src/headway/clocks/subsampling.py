"""Which meetings to look at: some hundreds, spread over time and over the ranks that met, the fast ones first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headway.arrays import Indices, Ints
from headway.clocks.matching import MESSAGE, mixed

if TYPE_CHECKING:
    from headway.clocks.meetings import Meetings

MAX_MEETINGS = 1_000
MAX_ROWS = 30_000
MAX_CLOCKS = 32  # in one meeting; of more, some in each, all in turn
FASTER_SHARE = 0.1  # of meetings of one time, what share is faster than the one that is taken


def subsample(meetings: Meetings) -> Meetings:
    """A part of the meetings.

    They are grouped by the ranks that took part and the one that arrived last. From each group, each stretch of its
    time gives one that was short: the less time it took, the less it leaves uncertain. The very fastest is not taken,
    which may be a flaw.
    """
    if not len(meetings):
        return meetings
    first = np.flatnonzero(np.diff(meetings.meeting, prepend=-1))
    clocks = np.diff(np.append(first, len(meetings)))
    if len(first) <= MAX_MEETINGS and len(meetings) <= MAX_ROWS:
        return meetings
    _, kind, counted = np.unique(_kind(meetings, first), return_inverse=True, return_counts=True)
    # Time is counted on one clock of each kind.
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
    """How long each meeting took from when all had arrived, by the clock of the rank that arrived last.

    Of a message, from its sending on one clock to its end on the other: that compares it with others of its kind.
    """
    own_ns = np.maximum(meetings.end_ns - meetings.arrival_ns, 0)
    least_ns: Ints = np.minimum.reduceat(own_ns, first)
    message = meetings.form[first] == MESSAGE
    sender = first[message] + ~meetings.holds[first[message]]
    receiver = first[message] + meetings.holds[first[message]]
    least_ns[message] = meetings.end_ns[receiver] - meetings.arrival_ns[sender]
    return least_ns


def _last_row(meetings: Meetings, first: Indices) -> Indices:
    """The row of the rank that arrived last at each meeting, or sent the message: the one that waited least."""
    own_ns = np.maximum(meetings.end_ns - meetings.arrival_ns, 0)
    order = np.lexsort((own_ns, ~meetings.holds, meetings.meeting))
    return order[first]


def _kind(meetings: Meetings, first: Indices) -> npt.NDArray[np.uint64]:
    last = meetings.clock[_last_row(meetings, first)]
    return mixed(meetings.company[first], last, meetings.form[first])


def _stretches(counted: Indices, clocks: float) -> Ints:
    """Into how many stretches of time each kind is cut, so that there are not too many meetings of all kinds."""
    fair = min(MAX_MEETINGS, MAX_ROWS / clocks) / len(counted)
    rare = counted <= fair
    if not rare.all():  # what rare kinds leave is for the others
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
