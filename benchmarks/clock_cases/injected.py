"""Clocks with errors that are known: readings of them, and how wrong an alignment is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from headway.arrays import Ints
from headway.clocks.aligning import aligned_ns
from headway.trace.events import Events, Kind
from headway.trace.format import ClockFit

OFFSET_MS = 50.0
DRIFT_PPM = 50.0


@dataclass(frozen=True)
class Clock:
    """A clock that at the true time ``t`` reads ``t - offset``, and since ``since_ns`` gains or loses ``drift``."""

    offset_ns: float = 0.0
    drift: float = 0.0
    since_ns: int = 0

    def read_ns(self, true_ns: Ints) -> Ints:
        passed_ns = (true_ns - self.since_ns) / (1 + self.drift) - self.offset_ns
        own: Ints = self.since_ns + np.rint(passed_ns).astype(np.int64)
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


def random_clocks(names: list[str], since_ns: int, generator: np.random.Generator) -> dict[str, Clock]:
    """Clocks whose offsets are within ±50 ms and whose drifts are within ±50 ppm; the first one is right."""
    clocks = {names[0]: Clock()}
    for name in names[1:]:
        clocks[name] = Clock(
            offset_ns=generator.uniform(-OFFSET_MS, OFFSET_MS) * 1e6,
            drift=generator.uniform(-DRIFT_PPM, DRIFT_PPM) * 1e-6,
            since_ns=since_ns,
        )
    return clocks


def round_trips(clock: Clock, ends_ns: Ints, generator: np.random.Generator) -> ClockFit:
    """What a round trip of 100 to 600 us before and one after the job would say, each way of any share of it."""
    own_ns = clock.read_ns(ends_ns)
    trips_ns = generator.uniform(100e3, 600e3, 2)
    offsets_ns = (ends_ns - own_ns) + trips_ns * generator.uniform(-0.5, 0.5, 2)
    drift = (offsets_ns[1] - offsets_ns[0]) / (own_ns[1] - own_ns[0])
    return ClockFit(
        offset_ns=float(offsets_ns[0]),
        drift_ppm=float(drift) * 1e6,
        reference_ns=int(own_ns[0]),
        uncertainty_ns=float(trips_ns.max()) / 2,
    )


def averaged(events: Mapping[int, Events], clock_of_rank: Mapping[int, str]) -> dict[str, ClockFit]:
    """Each host's mean difference of the ends of collectives, and no drift; nothing where there are no collectives."""
    ends = {rank: _ends(own) for rank, own in events.items()}
    first = ends[min(ends)]
    fits = {}
    for rank in sorted(ends):
        both = first.keys() & ends[rank].keys()
        if both and clock_of_rank[rank] not in fits:
            fits[clock_of_rank[rank]] = ClockFit(
                offset_ns=sum(first[key] - ends[rank][key] for key in both) / len(both)
            )
    return fits


def between_ends_us(events: Mapping[int, Events]) -> float:
    """The median of how long after the first member the last one ends; of messages, how long they are in flight."""
    first: dict[tuple[str, int], int] = {}
    last: dict[tuple[str, int], int] = {}
    for own in events.values():
        for key, end_ns in _ends(own).items():
            first[key] = min(first.get(key, end_ns), end_ns)
            last[key] = max(last.get(key, end_ns), end_ns)
    if first:
        return float(np.median([last[key] - first[key] for key in first])) / 1e3
    sent_ns, come_ns = (_moments(events, kind) for kind in (Kind.SEND, Kind.RECEIVE))
    return float(np.median([come_ns[key] - sent_ns[key] for key in sent_ns])) / 1e3


def _ends(events: Events) -> dict[tuple[str, int], int]:
    own = events.of_kind(Kind.COLLECTIVE)
    keys = zip(own.name.tolist(), own.sequence.tolist(), strict=True)
    return dict(zip(keys, own.end_ns.tolist(), strict=True))


def _moments(events: Mapping[int, Events], kind: str) -> dict[tuple[int, int, int], int]:
    """When each message was sent (or had come), by both ends and number."""
    found = {}
    for rank, own in events.items():
        picked = own.of_kind(kind)
        count: Counter[int] = Counter()
        times_ns = picked.start_ns if kind == Kind.SEND else picked.end_ns
        for peer, time_ns in zip(picked.peer.tolist(), times_ns.tolist(), strict=True):
            ends = (rank, peer) if kind == Kind.SEND else (peer, rank)
            found[*ends, count[peer]] = time_ns
            count[peer] += 1
    return found
