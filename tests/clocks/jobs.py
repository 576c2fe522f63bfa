"""What ranks did together at times that are known, and clocks that show other times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from headway.arrays import Floats, Ints
from headway.clocks import fit_clocks, meetings_of
from headway.clocks.aligning import aligned_ns
from headway.trace.events import Events, Kind, Stream
from headway.trace.format import ClockFit

US, MS, SECOND = 1_000, 1_000_000, 1_000_000_000
BEGIN_NS = 100 * SECOND


@dataclass(frozen=True)
class Clock:
    """Reads ``epoch + (t - offset) / (1 + drift)`` at ``t``."""

    offset_ms: float = 0.0
    drift_ppm: float = 0.0
    epoch_ns: int = 0

    def read_ns(self, true_ns: Ints) -> Ints:
        since_ns = (true_ns - BEGIN_NS) / (1 + self.drift_ppm * 1e-6) - self.offset_ms * MS
        return self.epoch_ns + BEGIN_NS + np.rint(since_ns).astype(np.int64)

    def read(self, events: Events) -> Events:
        start_ns = self.read_ns(events.start_ns)
        return replace(events, start_ns=start_ns, duration_ns=self.read_ns(events.end_ns) - start_ns)


@dataclass(frozen=True)
class Recovered:
    """What came of a job on skewed clocks: for each clock by how much it is wrong at most, and how much it may be."""

    fits: dict[str, ClockFit]
    error_us: dict[str, float]

    def covered(self, clock: str) -> bool:
        return self.error_us[clock] * US <= self.fits[clock].uncertainty_ns


def recovered(
    events: Mapping[int, Events],
    clocks: Mapping[str, Clock],
    clock_of_rank: Mapping[int, str] | None = None,
    *,
    prior: Mapping[str, ClockFit] | None = None,
) -> Recovered:
    """Show ``events`` (true times) on ``clocks`` and align them again."""
    of_rank = clock_of_rank or dict(zip(sorted(events), clocks, strict=True))
    shown = {rank: clocks[of_rank[rank]].read(own) for rank, own in events.items()}
    fits = fit_clocks(meetings_of(shown, of_rank), list(clocks), prior=prior)
    ends_ns = np.array(
        [min(own.start_ns.min() for own in events.values()), max(own.end_ns.max() for own in events.values())]
    )
    first = next(iter(clocks.values()))
    error_us = {
        name: float(np.abs(aligned_ns(clock.read_ns(ends_ns), fits[name]) - first.read_ns(ends_ns)).max())
        / US
        for name, clock in clocks.items()
    }
    return Recovered(fits, error_us)


def skewed(count: int, seed: int = 0) -> dict[str, Clock]:
    """Clocks off by up to 50 ms and 50 ppm; the first is right."""
    random = np.random.default_rng(seed)
    clocks = {"host 0": Clock()}
    for number in range(1, count):
        clocks[f"host {number}"] = Clock(random.uniform(-50, 50), random.uniform(-50, 50))
    return clocks


def collectives(
    ranks: int,
    count: int = 200,
    *,
    seconds: float = 20.0,
    took_us: Sequence[float] = (150.0, 3000.0),
    late_us: float = 20.0,
    always_late_us: Mapping[int, float] | None = None,
    comes_late_us: Mapping[int, float] | None = None,
    seed: int = 0,
) -> dict[int, Events]:
    """``count`` all-reduces: all end when the last has come and ``took_us`` (in turn) have passed, and a little later.

    ``late_us`` is the median by which ends are late, ``always_late_us`` what is added on some ranks, and
    ``comes_late_us`` by how much some always come after the others.
    """
    random = np.random.default_rng(seed)
    asked_us = np.linspace(0, seconds * 1e6, count)
    arrival_us = asked_us + random.uniform(0, 1000, (ranks, count))
    for rank, late in (comes_late_us or {}).items():
        arrival_us[rank] += late
    through_us = arrival_us.max(axis=0) + np.resize(np.array(took_us), count)
    end_us = through_us + late_us * random.lognormal(0, 1, (ranks, count))
    for rank, late in (always_late_us or {}).items():
        end_us[rank] += late
    return {rank: columns(Kind.COLLECTIVE, arrival_us[rank], end_us[rank]) for rank in range(ranks)}


def columns(
    kind: str, start_us: Floats, end_us: Floats, *, name: str = "all_reduce", peer: int = -1
) -> Events:
    start_ns = BEGIN_NS + np.rint(start_us * US).astype(np.int64)
    end_ns = BEGIN_NS + np.rint(end_us * US).astype(np.int64)
    sequence = np.arange(len(start_ns)) if kind == Kind.COLLECTIVE else np.full(len(start_ns), -1)
    return Events.from_columns(
        kind=kind, name=name, stream=Stream.COMMUNICATION, start_ns=start_ns, duration_ns=end_ns - start_ns,
        group="0", sequence=sequence, peer=peer,
    )  # fmt: skip


def messages(
    path: Sequence[int], count: int = 200, *, seconds: float = 20.0, back: bool = True, seed: int = 0
) -> dict[int, Events]:
    """Messages from each rank of ``path`` to the next, 100 to 300 us in flight, and ``back`` again."""
    random = np.random.default_rng(seed)
    parts: dict[int, list[Events]] = {rank: [] for rank in path}
    pairs = list(pairwise(path))
    for source, target in pairs + [(b, a) for a, b in pairs if back]:
        sent_us = np.sort(random.uniform(0, seconds * 1e6, count))
        come_us = sent_us + random.uniform(100, 300, count)
        parts[source].append(columns(Kind.SEND, sent_us, sent_us + 20, name="send", peer=target))
        parts[target].append(columns(Kind.RECEIVE, sent_us - 500, come_us, name="receive", peer=source))
    return {rank: Events.concatenated(own) for rank, own in parts.items()}
