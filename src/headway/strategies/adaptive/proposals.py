"""What is tried, what came of it, and what a proposer is: it decides what to try, the driver tries it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headway.cluster import Cluster
from headway.strategies.base import Strategy
from headway.strategies.candidates import Candidate, Learned, Question
from headway.strategies.decisions import Entry
from headway.strategies.live.agreement import Agreement


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate, and the step time that all ranks agree on (the mean where it was measured several times).

    ``uncertainty_ms`` is two standard errors of ``measured_ms``, of as few measurements as there are; infinite where it
    was measured once.
    """

    candidate: Candidate
    measured_ms: float
    uncertainty_ms: float = math.inf

    @classmethod
    def of(cls, candidate: Candidate, times_ms: Sequence[float]) -> Trial:
        """From what was measured, once or more often."""
        measured_ms = statistics.mean(times_ms)
        if len(times_ms) == 1:
            return cls(candidate, measured_ms)
        return cls(candidate, measured_ms, 2 * statistics.stdev(times_ms) / math.sqrt(len(times_ms)))


@dataclass(frozen=True)
class Setting:
    """A question, and how the ranks that ask it agree."""

    question: Question
    agreement: Agreement


class Proposer(Protocol):
    """Decides what to try, on every rank alike. It may talk to the other ranks in any of its methods.

    ``learns`` says whether it asks for ``Question.learned``, which is None all the same where a device computes.
    """

    learns: bool

    def begin(self, setting: Setting) -> None:
        """Tuning begins, or begins again."""

    def is_ready(self) -> bool:
        """Whether it has something to propose; asked behind each step until it has, and the same on every rank.

        Raises TuningEndedError where there is nothing to tune.
        """

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
    ``ended_early`` says why nothing was chosen. ``strategy`` decides what was left in force; ``steps`` is what it took,
    behind ``waited_steps`` in which another model was tuned.
    ``note`` says why stock DDP was not tried, where it was not.
    """

    strategy: Strategy
    candidates: tuple[Candidate, ...]
    measured_ms: tuple[float, ...]
    chosen: int | None
    steps: int
    learned: Learned | None = None
    ended_early: str = ""
    note: str = ""
    waited_steps: int = 0

    @property
    def all_steps(self) -> int:
        """How many steps there were until it ended."""
        return self.steps + self.waited_steps

    @property
    def predicted_ms(self) -> tuple[float | None, ...]:
        """The step predicted of each candidate."""
        return tuple(candidate.predicted_ms for candidate in self.candidates)

    @property
    def cluster(self) -> Cluster | None:
        """The links as they were measured, where anybody needed them."""
        return None if self.learned is None else self.learned.cluster

    @property
    def verdict(self) -> str:
        """In words, how stock DDP compared with the best of the decoupled schedules; "" where it was not tried."""
        stock = [
            ms for candidate, ms in zip(self.candidates, self.measured_ms, strict=True) if candidate.is_stock
        ]
        ours = [
            ms
            for candidate, ms in zip(self.candidates, self.measured_ms, strict=True)
            if not candidate.is_stock
        ]
        if self.chosen is None or not stock or not ours:
            return self.note
        if not self.candidates[self.chosen].is_stock:
            return f"faster than stock DDP: {self.measured_ms[self.chosen]:.4g} against {min(stock):.4g} ms"
        taken_ms = self.measured_ms[self.chosen]
        how = "is as fast" if taken_ms > min(ours) else "was faster"
        return f"stock DDP {how}: {taken_ms:.4g} against {min(ours):.4g} ms"

    @property
    def reason(self) -> str:
        """In words, what came of it."""
        return "; ".join(
            part for part in (f"tuned in {self.steps} steps", self.ended_early or self.verdict) if part
        )

    def entry(self, step: int, before: str) -> Entry:
        """It as a decision after ``step``, where what is described as ``before`` was in force."""
        predicted = {
            candidate.strategy.describe(): candidate.predicted_ms
            for candidate in self.candidates
            if candidate.predicted_ms is not None
        }
        return Entry(
            step=step, before=before, order=self.strategy.describe(), reason=self.reason,
            measured_ms=0.0 if self.chosen is None else self.measured_ms[self.chosen], predicted_ms=predicted,
        )  # fmt: skip

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
        verdict = f"{self.verdict}. Tried: " if self.verdict else ""
        return f"tuned in {self.steps} steps: {verdict}{tried}"
