"""Predicts a step whose computation is slowed down by collectives in flight on the same cores.

Like the surrogate, this assumes identical ranks, and a test compares it with replay. A step is counted from the first
gradient of a backward. Until the next forward nothing waits, so the begins and ends of collectives say what is in
flight. Forward only waits for gathers, so all it computes until the last one ends is slowed down. Deferred updates are
not slowed down here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from headway.graph.disturbance import ROUNDS
from headway.graph.step_layout import StepProfile
from headway.intervals import merged
from headway.planning.channel_queue import begins
from headway.planning.surrogate import Played, Predictor
from headway.scheduling.buckets import BucketSchedule


@dataclass(frozen=True, slots=True)
class Slowed:
    """Slows computation by ``1 + slowdown`` within ``spans`` (sorted, ns from its beginning)."""

    spans: tuple[tuple[float, float], ...]
    slowdown: float

    def taken_ns(self, computed_ns: float) -> float:
        """The slowed-down duration of computation that takes ``computed_ns`` undisturbed."""
        now_ns, left_ns, factor = 0.0, computed_ns, 1 + self.slowdown
        for start_ns, end_ns in self.spans:
            before_ns = start_ns - now_ns
            if left_ns <= before_ns:
                break
            left_ns, now_ns = left_ns - before_ns, start_ns
            within_ns = (end_ns - start_ns) / factor
            if left_ns <= within_ns:
                return now_ns + left_ns * factor
            left_ns, now_ns = left_ns - within_ns, end_ns
        return now_ns + left_ns

    def computed_ns(self, taken_ns: float) -> float:
        """The undisturbed duration of computation that took ``taken_ns``."""
        within_ns = sum(max(0.0, min(end_ns, taken_ns) - start_ns) for start_ns, end_ns in self.spans)
        return taken_ns - within_ns * self.slowdown / (1 + self.slowdown)


def predict_disturbed(predictor: Predictor, schedule: BucketSchedule) -> float:
    """The step of ``schedule`` (ns) with its cluster's slowdown, if the profile of ``predictor`` is undisturbed."""
    played = predictor.played_of(schedule)
    slowdown, seen = predictor.cluster.compute_slowdown, predictor
    for _ in range(ROUNDS if slowdown else 0):
        behind, forward = _in_flight(played, seen.profile, slowdown)
        profile = _moved(predictor.profile, behind.taken_ns, forward.taken_ns)
        seen = Predictor(predictor.model, profile, predictor.cluster, predictor.algorithms, predictor.costs)
        played = seen.played_of(schedule)
    return played.step_ns


def undisturbed(predictor: Predictor, schedule: BucketSchedule) -> StepProfile:
    """The profile of ``predictor``, recorded under ``schedule``, without the slowdown."""
    slowdown = predictor.cluster.compute_slowdown
    if not slowdown:
        return predictor.profile
    behind, forward = _in_flight(predictor.played_of(schedule), predictor.profile, slowdown)
    return _moved(predictor.profile, behind.computed_ns, forward.computed_ns)


def _in_flight(played: Played, profile: StepProfile, slowdown: float) -> tuple[Slowed, Slowed]:
    """The slowdown from the first gradient to the next forward, and the slowdown from there on."""
    begins_ns = begins(played.launched.jobs, played.ends_ns, played.channels)
    spans = merged(zip(begins_ns, played.ends_ns, strict=True))
    forward_at_ns = profile.backward_ns + profile.tail_ns - _first_ns(profile) + profile.rest_ns
    computed_ns = max(0.0, max(played.ends_ns, default=0.0) - forward_at_ns - played.held_ns)
    return Slowed(tuple(spans), slowdown), Slowed(((0.0, computed_ns),), slowdown)


def _moved(
    profile: StepProfile, behind: Callable[[float], float], forward: Callable[[float], float]
) -> StepProfile:
    """Map the times of ``profile``: by ``behind`` from the first gradient to the next forward, then by ``forward``."""
    first_ns = _first_ns(profile)
    end_ns = profile.backward_ns - first_ns
    step_ns = end_ns + profile.tail_ns
    return replace(
        profile,
        forward_ns=round(forward(profile.forward_ns)),
        between_ns=round(forward(profile.forward_ns + profile.between_ns) - forward(profile.forward_ns)),
        backward_ns=first_ns + round(behind(end_ns)),
        tail_ns=round(behind(step_ns) - behind(end_ns)),
        rest_ns=round(behind(step_ns + profile.rest_ns) - behind(step_ns)),
        needs_ns={name: round(forward(moment_ns)) for name, moment_ns in profile.needs_ns.items()},
        ready_ns={
            name: first_ns + round(behind(moment_ns - first_ns))
            for name, moment_ns in profile.ready_ns.items()
        },
    )


def _first_ns(profile: StepProfile) -> int:
    return min(profile.ready_ns.values(), default=0)
