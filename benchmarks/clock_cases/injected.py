"""Clocks with errors that are known: readings of them, and how wrong an alignment is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from headway.trace.clocks.aligning import aligned_ns
from headway.trace.events import Events, Ints
from headway.trace.format import ClockFit

OFFSET_MS = 50.0
DRIFT_PPM = 50.0


@dataclass(frozen=True)
class Clock:
    """A clock that reads ``epoch + (t - offset) / (1 + drift)`` at the true time ``t``."""

    epoch_ns: int = 0
    offset_ns: float = 0.0
    drift: float = 0.0

    def read_ns(self, true_ns: Ints) -> Ints:
        own: Ints = self.epoch_ns + np.rint((true_ns - self.offset_ns) / (1 + self.drift)).astype(np.int64)
        return own

    def error_ns(self, true_ns: Ints, fit: ClockFit) -> float:
        """By how much ``fit`` is wrong at most at these times."""
        return float(np.abs(aligned_ns(self.read_ns(true_ns), fit) - true_ns).max())

    def read(self, events: Events) -> Events:
        """Events as a recorder on this clock would have timed them."""
        start_ns = self.read_ns(events.start_ns)
        enqueue_ns = np.where(events.enqueue_ns >= 0, self.read_ns(events.enqueue_ns), -1)
        return replace(
            events,
            start_ns=start_ns,
            duration_ns=self.read_ns(events.end_ns) - start_ns,
            enqueue_ns=enqueue_ns,
        )


def random_clocks(names: list[str], generator: np.random.Generator) -> dict[str, Clock]:
    """Offsets within ±50 ms and drifts within ±50 ppm; the first clock is true."""
    clocks = {names[0]: Clock()}
    for name in names[1:]:
        clocks[name] = Clock(
            offset_ns=generator.uniform(-OFFSET_MS, OFFSET_MS) * 1e6,
            drift=generator.uniform(-DRIFT_PPM, DRIFT_PPM) * 1e-6,
        )
    return clocks


def averaged(events: Mapping[int, Events], clock_of_rank: Mapping[int, str]) -> dict[str, ClockFit]:
    """What aligning by averages gives: each host's mean difference of the ends of collectives, and no drift."""
    ends: dict[str, dict[tuple[str, str, int], int]] = {}
    for rank in sorted(events):
        of_clock = ends.setdefault(clock_of_rank[rank], {})
        own = events[rank].of_kind("collective")
        keys = zip(own.group.tolist(), own.name.tolist(), own.sequence.tolist(), strict=True)
        for key, end_ns in zip(keys, own.end_ns.tolist(), strict=True):
            of_clock.setdefault(key, end_ns)
    names = list(ends)
    fits = {}
    for name in names:
        both = ends[names[0]].keys() & ends[name].keys()
        ahead_ns = [ends[names[0]][key] - ends[name][key] for key in both]
        fits[name] = ClockFit(offset_ns=sum(ahead_ns) / len(ahead_ns) if ahead_ns else 0.0)
    return fits
