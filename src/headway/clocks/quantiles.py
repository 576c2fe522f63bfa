"""Medians and other quantiles of many groups at once."""

from __future__ import annotations

import numpy as np

from headway.arrays import Floats, Indices


def medians(values: Floats, groups: Indices, weights: Floats, count: int, *, share: float = 0.5) -> Floats:
    """The weighted median, or what ``share`` of values is below, of each of ``count`` groups; nan where it has none."""
    order = np.lexsort((values, groups))
    values, groups, weights = values[order], groups[order], weights[order]
    reached = np.cumsum(weights)
    first = np.searchsorted(groups, np.arange(count))
    last = np.searchsorted(groups, np.arange(count), side="right")
    before = np.where(first > 0, reached[first - 1], 0.0) if len(values) else np.zeros(count)
    found = np.full(count, np.nan)
    some = last > first
    wanted = before[some] * (1 - share) + reached[last[some] - 1] * share
    place = np.clip(np.searchsorted(reached, wanted), first[some], last[some] - 1)
    found[some] = values[place]
    return found
