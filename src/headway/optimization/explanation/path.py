"""What the critical path of a replay is made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.diagnosis.diagnosis import diagnose
from headway.replayer.as_trace import replayed_trace
from headway.replayer.replayer import Replayer
from headway.replayer.simulate import Simulation
from headway.strategies.horizon import Outcome
from headway.trace.events import Kind

COMPUTATION, COMMUNICATION, WAITING, UPDATE, REST = (
    "computation", "exposed communication", "waiting", "update", "rest",
)  # fmt: skip
_PARTS = {
    Kind.FORWARD: COMPUTATION,
    Kind.BACKWARD: COMPUTATION,
    Kind.FORWARD_PASS: COMPUTATION,
    Kind.BACKWARD_PASS: COMPUTATION,
    Kind.COLLECTIVE: COMMUNICATION,
    Kind.SEND: COMMUNICATION,
    Kind.RECEIVE: COMMUNICATION,
    Kind.WAIT: WAITING,
    Kind.UPDATE: UPDATE,
    Kind.OPTIMIZER: UPDATE,
}


@dataclass(frozen=True, slots=True)
class PathParts:
    """Milliseconds of the critical path of a step, by part and rank; a collective counts with the rank it was seen on.

    Communication on the critical path is exposed: were it hidden, the path would go through what hides it.
    """

    ms: Mapping[tuple[str, int], float] = field(hash=False)

    @property
    def step_ms(self) -> float:
        """The length of the path: the step of which it is one."""
        return sum(self.ms.values())

    @property
    def parts_ms(self) -> dict[str, float]:
        """The same by part alone, longest first."""
        found: dict[str, float] = defaultdict(float)
        for (part, _), part_ms in self.ms.items():
            found[part] += part_ms
        return dict(sorted(found.items(), key=lambda each: -each[1]))

    def rank_of(self, part: str) -> int:
        """The rank on which the path has most of ``part``."""
        own = {rank: part_ms for (name, rank), part_ms in self.ms.items() if name == part}
        return max(own, key=own.__getitem__)

    def scaled_to(self, step_ms: float) -> PathParts:
        """The same shares of a step that takes ``step_ms``."""
        factor = step_ms / self.step_ms if self.ms else 1.0
        return PathParts({each: part_ms * factor for each, part_ms in self.ms.items()})

    def less(self, after: PathParts) -> PathParts:
        """What ``after`` has less of; below 0 where it has more."""
        both = {**self.ms, **after.ms}
        return PathParts({each: self.ms.get(each, 0.0) - after.ms.get(each, 0.0) for each in both})


def iteration_of(outcome: Outcome) -> PathParts:
    """A mean iteration of a rank, where each takes its own: what all compute in it, and stand still for groups."""
    count = sum(outcome.iterations)
    duration_ns = outcome.until_ns - outcome.from_ns
    waiting_ms = {
        (WAITING, rank): standing_ns / count / 1e6 for rank, standing_ns in enumerate(outcome.standing_ns)
    }
    own_ms = {
        (COMPUTATION, rank): (duration_ns - standing_ns) / count / 1e6
        for rank, standing_ns in enumerate(outcome.standing_ns)
    }
    return PathParts({**own_ms, **waiting_ms})


def path_of(replayer: Replayer, played: Simulation) -> PathParts:
    """The critical path of the typical replayed step, in the proportion in which it makes up the mean step."""
    found: dict[tuple[str, int], float] = defaultdict(float)
    for piece in diagnose(replayed_trace(replayer, played)).critical_path:
        found[_PARTS.get(piece.kind, REST), piece.rank] += piece.ms
    return PathParts(dict(found)).scaled_to(played.step_ms)
