"""Spans inside spans on one line."""

from __future__ import annotations

import numpy as np

from headway.arrays import Ints
from headway_readers.xplane.profile import Profile

_DEEPEST = 64  # spans around a moment that are looked at


def enclosing(profile: Profile, spans: Ints, events: Ints) -> Ints:
    """The innermost of ``spans`` that each of ``events`` begins in, as a place in ``spans``; -1 where it is in none.

    Both are events' places in the profile, in order, which is that of lines and starts.
    """
    if not len(spans):
        return np.full(len(events), -1)
    line, start, end = profile.line, profile.start_ns, profile.end_ns
    outer = _outer(line[spans].tolist(), start[spans].tolist(), end[spans].tolist())
    found = np.searchsorted(spans, events, side="right") - 1
    for _ in range(_DEEPEST):
        at = spans[np.maximum(found, 0)]
        misses = (found >= 0) & ((line[at] != line[events]) | (end[at] <= start[events]))
        if not misses.any():
            return found
        found = np.where(misses, outer[np.maximum(found, 0)], found)
    return np.where(misses, -1, found)


def _outer(line: list[int], start: list[int], end: list[int]) -> Ints:
    """The span around each span, as a place among them; -1 where there is none."""
    outer = np.full(len(line), -1, dtype=np.int64)
    open_spans: list[int] = []
    for span in range(len(line)):
        while open_spans and (line[open_spans[-1]] != line[span] or end[open_spans[-1]] <= start[span]):
            open_spans.pop()
        if open_spans:
            outer[span] = open_spans[-1]
        open_spans.append(span)
    return outer
