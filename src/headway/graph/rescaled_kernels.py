"""Recorded computation of which some kernels take another time: the what-if of faster kernels."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from headway.intervals import Intervals
from headway.trace.events import Events, Kind


class RescaledKernels:
    """How long stretches of one rank take where what matches patterns takes another time."""

    def __init__(self, events: Events, factors: Mapping[str, float]) -> None:
        spans = {pattern: _matched(events, pattern) for pattern in factors}
        self._found = {pattern for pattern, own in spans.items() if own}
        self._matched = [(Intervals(own), factors[pattern]) for pattern, own in spans.items()]

    def matches(self, pattern: str) -> bool:
        """Whether anything was recorded under such a name."""
        return pattern in self._found

    def duration_ns(self, start_ns: int, end_ns: int) -> int:
        """What the stretch from ``start_ns`` to ``end_ns`` would take."""
        taken = float(end_ns - start_ns)
        for found, factor in self._matched:
            taken *= 1 - found.share_of(start_ns, end_ns) * (1 - factor)
        return round(taken)


def _matched(events: Events, pattern: str) -> list[tuple[int, int]]:
    """The spans of operators whose names match, or of modules where there are none."""
    for kinds in ((Kind.OPERATOR,), (Kind.FORWARD, Kind.BACKWARD)):
        spans = [
            (row.start_ns, row.end_ns) for row in events.of_kind(*kinds) if fnmatchcase(row.name, pattern)
        ]
        if spans:
            return spans
    return []
