"""What is tried, what came of it, and what a proposer is: it decides what to try, the driver tries it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field

from headway.cluster import Cluster
from headway.graph.computation import Computation
from headway.graph.step_profile import StepProfile
from headway.job import Job
from headway.model import ModelSpec
from headway.scheduling.buckets import BucketSchedule, GatherMode
from headway.strategies.data_parallel.decoupled.policy import DecoupledStrategy, options_of
from headway.strategies.data_parallel.decoupled.tuning.agreement import Agreement


class TuningEndedError(Exception):
    """Tuning cannot go on, on any rank; the message says why."""


class Candidate(BaseModel):
    """A strategy with its buckets spelled out, and the step that is predicted of it where anybody did."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    strategy: DecoupledStrategy
    predicted_ms: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    @classmethod
    def of(
        cls, name: str, schedule: BucketSchedule, model: ModelSpec, predicted_ms: float | None = None
    ) -> Candidate:
        """The candidate that decides ``schedule``."""
        strategy = DecoupledStrategy.model_validate(options_of(schedule, model))
        return cls(name=name, strategy=strategy, predicted_ms=predicted_ms)


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate, and the step time that all ranks agree on (the mean where it was measured several times)."""

    candidate: Candidate
    measured_ms: float


@dataclass(frozen=True, slots=True)
class Learned:
    """What the steps before taught: their profile, and a share of the cluster's costs."""

    profile: StepProfile
    cluster: Cluster

    def job(self, model: ModelSpec) -> Job:
        """The job that was watched, which trains ``model``."""
        steps = Computation({0: (self.profile.timeline(),)})
        return Job((model,), self.cluster.world_size, self.cluster, steps)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is to be tuned, the same on every rank. ``forms`` are the gathers that may be proposed."""

    model: ModelSpec
    in_force: BucketSchedule
    forms: tuple[GatherMode, ...]
    channels: int
    agreement: Agreement
    learned: Learned | None


class Proposer(Protocol):
    """Decides what to try, on every rank alike. It may talk to the other ranks in any of its methods.

    ``learns`` says whether it asks for ``Setting.learned``, which is None all the same where a device computes.
    """

    learns: bool

    def begin(self, setting: Setting) -> None:
        """Tuning begins, or begins again. Raises TuningEndedError where there is nothing to tune."""

    def propose(self) -> Candidate | None:
        """What to try next, perhaps again; None when enough has been tried."""

    def tell(self, candidate: Candidate, measured_ms: float) -> None:
        """What was proposed took so long a step, the same on every rank."""

    def choose(self, trials: Sequence[Trial]) -> int:
        """The index of the trial that shall stay in force; there is at least one."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a tuner tried and what it left in force.

    ``predicted_ms`` and ``measured_ms`` belong to ``candidates``, ``chosen`` is an index of them, or None where
    ``ended_early`` says why nothing was chosen. ``strategy`` decides what was left in force; ``steps`` is what it took.
    """

    strategy: DecoupledStrategy
    candidates: tuple[Candidate, ...]
    measured_ms: tuple[float, ...]
    chosen: int | None
    steps: int
    learned: Learned | None = None
    ended_early: str = ""

    @property
    def predicted_ms(self) -> tuple[float | None, ...]:
        """The step predicted of each candidate."""
        return tuple(candidate.predicted_ms for candidate in self.candidates)

    @property
    def cluster(self) -> Cluster | None:
        """The links as they were measured, where anybody needed them."""
        return None if self.learned is None else self.learned.cluster

    def describe(self) -> str:
        """Say in a line what was tried."""
        tried = "; ".join(
            f"{'* ' if index == self.chosen else ''}{candidate.name} ({candidate.strategy.describe()}): "
            f"{'not predicted' if candidate.predicted_ms is None else f'predicted {candidate.predicted_ms:.2f} ms'}, "
            f"measured {measured:.2f} ms"
            for index, (candidate, measured) in enumerate(zip(self.candidates, self.measured_ms, strict=True))
        )
        if self.ended_early:
            return f"tuning ended early after {self.steps} steps: {self.ended_early}. Tried: {tried or 'nothing'}"
        return f"tuned in {self.steps} steps: {tried}"
