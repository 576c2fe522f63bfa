"""How far one rank's clock is ahead of another's: the distance at which most of their collectives end together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headway.arrays import Indices, Ints
from headway.interop.readers.completed import CompletedCollectives, nearest, of_one_kind

TOGETHER_NS = 2_000_000  # how far ends may be apart, drift of clocks over a recording included
FINEST_NS = 20_000  # what lies more closely together cannot be told apart
MOST_APART = (
    32  # collectives of one kind and step that one rank may have recorded before another's first, if not more
)
_WINDOWS_NS = (TOGETHER_NS, 600_000, 200_000, 60_000)  # within which distances may be one
_GUESSES = 4  # of the distance, a window
_SAMPLE, _PAIRS = (
    400,
    100_000,
)  # collectives of a rank from which its distance is told, and pairs that they may form


def distance_of_clocks_ns(known: CompletedCollectives, own: CompletedCollectives) -> int:
    """The distance at which the most collectives end together the most closely."""
    here, there = _candidates(known, own)
    apart_ns = own.end_ns[here] - known.end_ns[there]
    order = np.argsort(apart_ns)
    apart_ns, weight = apart_ns[order], _alike(own.step[here], known.step[there])[order]
    looked_at = own.where(np.unique(here))
    best, distance_ns = -1.0, 0
    for guess_ns in {one for window_ns in _WINDOWS_NS for one in _commonest(apart_ns, weight, window_ns)}:
        pair = nearest(known, looked_at, np.full(len(looked_at), guess_ns), TOGETHER_NS)
        matched = np.flatnonzero(pair >= 0)
        off_ns = np.abs(looked_at.end_ns[matched] - guess_ns - known.end_ns[pair[matched]])
        # How much likelier each is at the right distance than at any.
        likelier = np.log(TOGETHER_NS / np.clip(off_ns, FINEST_NS, TOGETHER_NS))
        likely = float((likelier * _alike(looked_at.step[matched], known.step[pair[matched]])).sum())
        if likely > best:
            best, distance_ns = likely, guess_ns
    return distance_ns


def _alike(step: Ints, other: Ints) -> npt.NDArray[np.float64]:
    """How much pairs of two steps count: steps are numbered alike, but for what lies on their borders."""
    return np.where(step == other, 1.0, 0.6)


def _commonest(apart_ns: Ints, weight: npt.NDArray[np.float64], window_ns: int) -> list[int]:
    """The middles of the windows that hold the most of the sorted ``apart_ns``, the first few that do not overlap."""
    total = np.concatenate([[0.0], np.cumsum(weight)])
    reach = np.searchsorted(apart_ns, apart_ns + window_ns, side="right")
    within = total[reach] - total[:-1]
    found: list[int] = []
    while len(found) < _GUESSES and within.any():
        begin = int(np.argmax(within))
        found.append(int(np.median(apart_ns[begin : reach[begin]])))
        within[np.abs(apart_ns - apart_ns[begin]) <= window_ns] = 0
    return found


def _candidates(known: CompletedCollectives, own: CompletedCollectives) -> tuple[Indices, Indices]:
    """Pairs of one kind that may be the same collective: about as far on in the same step, or in a neighbouring one.

    ``own`` is a sample where there are many.
    """
    heres, theres = [], []
    every = -(-len(own) // _SAMPLE)
    most = max(MOST_APART, _PAIRS // (2 * min(len(own), _SAMPLE)))
    for mine, others in of_one_kind(known, own):
        looked_at = _sample(own.step[mine], every)
        place = _places_in(known.step[others], own.step[mine])[looked_at]
        apart = min(most, len(others) + len(mine))
        column = place[:, None] + np.arange(-apart, apart + 1)
        row, at = np.nonzero((column >= 0) & (column < len(others)))
        heres.append(mine[looked_at[row]])
        theres.append(others[column[row, at]])
    here, there = (
        np.concatenate(parts) if parts else np.zeros(0, dtype=np.intp) for parts in (heres, theres)
    )
    near = np.abs(own.step[here] - known.step[there]) <= 1
    return here[near], there[near]


def _sample(step: Ints, every: int) -> Indices:
    """One or two of ``every`` places: where steps begin and end, which tells a collective from the next; and others."""
    ends = np.flatnonzero(np.diff(step, prepend=step[0] - 1, append=step[-1] + 1))
    borders = np.unique(np.concatenate([ends[:-1], ends[1:] - 1]))
    thin = -(-len(borders) * every // len(step)) | 1  # not only beginnings, nor only ends
    return np.union1d(borders[::thin], np.arange(0, len(step), every))


def _places_in(theirs: Ints, mine: Ints) -> Indices:
    """For each of ``mine`` the place among ``theirs`` of what is as manieth in its step; steps are in order, mostly."""
    their_steps, their_first = np.unique(theirs, return_index=True)
    my_steps, my_first = np.unique(mine, return_index=True)
    begins = np.append(their_first, len(theirs))[np.searchsorted(their_steps, my_steps)]
    return (np.arange(len(mine)) + (begins - my_first)[np.searchsorted(my_steps, mine)]).astype(np.intp)
