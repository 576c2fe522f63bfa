"""Where a step's time went: parts that add up to the step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import numpy as np

from headway import intervals
from headway.diagnosis.timeline import RankTime

NS_A_MS = 1e6


@dataclass(frozen=True, slots=True)
class Breakdown:
    """One rank's mean step in milliseconds, in parts that add up to it."""

    computation: float  # forward, backward and deferred updates, without what they waited for
    exposed_communication: float  # waiting while a collective with all its members was in flight
    straggler_wait: float  # waiting while every collective in flight still lacked a member
    input: float  # waiting for the data loader
    optimizer: float
    rest: float  # everything that no event explains

    @property
    def total_ms(self) -> float:
        """The parts' sum: the step."""
        return float(sum(asdict(self).values()))

    def rounded(self) -> dict[str, float]:
        """The parts by name, to the nanosecond."""
        return {part: round(value, 6) for part, value in asdict(self).items()}


PARTS: tuple[str, ...] = tuple(field.name for field in fields(Breakdown))


def breakdown(time: RankTime) -> Breakdown:
    """Split one rank's mean recorded step. Sums are of integer nanoseconds, so nothing is lost."""
    steps = len(time.step_start_ns)
    own = {
        "computation": time.per_step(time.forward).sum() + time.per_step(time.backward).sum(),
        "exposed_communication": time.per_step(time.exposed).sum(),
        "straggler_wait": time.per_step(time.straggling).sum(),
        "input": time.per_step(time.input).sum(),
        "optimizer": time.per_step(time.optimizer).sum(),
    }
    whole = int((time.step_end_ns - time.step_start_ns).sum())
    own["rest"] = np.int64(whole - sum(int(value) for value in own.values()))
    return Breakdown(**{part: int(own[part]) / steps / NS_A_MS for part in PARTS})


def mean_breakdown(breakdowns: list[Breakdown]) -> Breakdown:
    """The mean over ranks."""
    return Breakdown(
        **{part: sum(getattr(one, part) for one in breakdowns) / len(breakdowns) for part in PARTS}
    )


def overlap_percent(times: list[RankTime]) -> float:
    """How much of the communication, over all ranks, lies under computation; 0 where there is none."""
    hidden = total = 0
    for time in times:
        computing = intervals.join(time.forward, time.backward, time.optimizer)
        total += int(time.per_step(time.communicating).sum())
        hidden += int(time.per_step(intervals.intersect(time.communicating, computing)).sum())
    return 100.0 * hidden / total if total else 0.0
