"""The tuner in a replay: the same value as the live one, told what ranks see of steps that are played."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from headway.job import Job
from headway.strategies.pipeline.tuning.tuner import Decision, PlayedSteps, Tuner

DECIDED_AFTER = 1  # steps that go by while the live tuner thinks


class FollowedStep(NamedTuple):
    """A step under ``candidate`` that took ``time_ms``, and what the tuner said when it was told of it."""

    candidate: int
    time_ms: float
    decision: Decision


def followed(tuner: Tuner, steps: Iterable[Job]) -> Iterator[FollowedStep]:
    """One step of each of ``steps``, each on a network of its own, in the order that the tuner wants by then.

    A decision is in force from the next step but one, as live, where the tuner thinks while the next one runs.
    """
    current = 0
    waiting: list[int] = []
    for number, job in enumerate(steps):
        schedule = tuner.candidates[current].schedule_of(len(job.stages))
        played = PlayedSteps(job, schedule)
        tuner = tuner.after(played.observed(number, current))
        assert tuner.latest is not None
        yield FollowedStep(current, played.times_ms[-1], tuner.latest)
        waiting.append(tuner.latest.candidate if tuner.latest.before == current else current)
        if len(waiting) > DECIDED_AFTER:
            current = waiting.pop(0)
