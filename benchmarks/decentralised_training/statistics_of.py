"""Intervals of medians, and percentiles."""

from __future__ import annotations

from collections.abc import Sequence

from common import median_interval


def interval(values: Sequence[float], digits: int = 3) -> str:
    """The 95 % interval of the median (bootstrap)."""
    if len(values) < 2:
        return ""
    low, high = median_interval(values)
    return f"{low:.{digits}g} to {high:.{digits}g}"


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so many of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
