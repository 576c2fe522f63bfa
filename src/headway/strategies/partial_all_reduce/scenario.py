"""What a simulated job of decentralised training lives through: how long, who is slow, who dies and who joins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headway.graph.timeline import Part, Point, Timeline
from headway.incidents import Incidents
from headway.strategies.slowing import jittered, slowed


@dataclass(frozen=True)
class Scenario:
    """Times are nanoseconds from the start.

    What happens until ``from_ns`` is a warm-up; nothing is simulated from ``until_ns`` on. ``deaths`` and ``joins``
    are (time, rank): a rank that joins first is not there from the start; one may join again after its death. Every
    iteration takes, with the probability ``slow_share``, ``slow_factor`` times as long, and a share of up to ``jitter``
    more or less, by ``seed``.
    """

    until_ns: int
    from_ns: int = 0
    deaths: Sequence[tuple[int, int]] = ()
    joins: Sequence[tuple[int, int]] = ()
    slow_share: float = 0.0
    slow_factor: float = 1.0
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.from_ns < self.until_ns:
            raise ValueError(f"no time lies between {self.from_ns} ns and {self.until_ns} ns")
        if any(time_ns < 1 for time_ns, _ in (*self.deaths, *self.joins)):
            raise ValueError("ranks die and join after the start")
        if (rank := self._incidents.twice()) is not None:
            raise ValueError(f"rank {rank} dies or joins twice, one time after the other")

    @property
    def _incidents(self) -> Incidents:
        return Incidents(deaths=tuple(self.deaths), joins=tuple(self.joins))

    def absent_first(self, rank: int) -> bool:
        """Whether a rank is not there from the start: the first that happens to it is that it joins."""
        happens = self._incidents.of(rank)
        return bool(happens) and happens[0][1]

    def factor(self, rank: int, iteration: int) -> float:
        """How many times as long as usual an iteration of a rank takes."""
        slow = slowed(self.slow_share, self.slow_factor, self.seed, rank, iteration)
        return slow * jittered(self.jitter, self.seed, rank, iteration)


@dataclass(frozen=True)
class Iterations:
    """What each rank computes: its steps one after the other, again and again.

    ``steps[rank][position]`` are the parts of a step and their times (ns), without any communication.
    """

    steps: Sequence[Sequence[Sequence[tuple[str, int]]]]
    scenario: Scenario
    factors: Mapping[int, float] = field(default_factory=dict)  # of single ranks, besides

    def of(self, rank: int, iteration: int) -> Sequence[tuple[str, int]]:
        """The parts of an iteration, in order."""
        own = self.steps[rank]
        factor = self.scenario.factor(rank, iteration) * self.factors.get(rank, 1.0)
        return [(part, round(time_ns * factor)) for part, time_ns in own[iteration % len(own)]]


def parts_of(timeline: Timeline) -> tuple[tuple[str, int], ...]:
    """What a rank computes in a step that communicates nothing until its end.

    The collectives of the recorded strategy are not there, and so neither is what it did with their results; nor are
    those of the script itself, such as the average of a loss: they would bring ranks together at every step.
    """
    parts: list[tuple[str, int]] = []
    optimizer_ns = timeline.optimizer_ns
    for item in timeline.items:
        if item.kind == Point.STEP:
            kind, time_ns, optimizer_ns = Part.OPTIMIZER, optimizer_ns, 0
        elif item.kind in (Part.OPTIMIZER, Part.FINALIZE):
            continue
        else:
            kind, time_ns = item.kind, item.duration_ns
        if time_ns <= 0:
            continue
        if parts and parts[-1][0] == kind:
            parts[-1] = (kind, parts[-1][1] + time_ns)
        else:
            parts.append((kind, time_ns))
    return tuple(parts) or ((Part.REST, 1),)
