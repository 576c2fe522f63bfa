"""Comparison: whether a job became slower since another recording of it, and where."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from headway.diagnosis.breakdown import PARTS, mean_breakdown
from headway.diagnosis.diagnosis import Diagnosis
from headway.diagnosis.findings import milliseconds, percent
from headway.errors import TraceError
from headway.trace.format import Trace

PART_WORDS = {
    "computation": "in computation",
    "exposed_communication": "waiting for communication",
    "straggler_wait": "waiting for other ranks",
    "input": "waiting for input",
    "optimizer": "in the optimizer",
    "rest": "outside of the passes",
}
DEFAULT_THRESHOLD = 0.05
SURE = 2.0  # standard errors that a change has to exceed to count


@dataclass(frozen=True)
class Comparison:
    """A diagnosis held against a baseline's. Differences are new minus old, of mean steps in ms.

    ``noise_ms`` is how much two recordings of the same job may differ by chance: two standard errors of their steps.
    ``steps`` is how many the shorter of both recordings has.
    """

    baseline_step_ms: float
    step_ms: float
    noise_ms: float
    threshold: float
    steps: int
    parts_ms: dict[str, float]
    new_causes: tuple[str, ...]
    gone_causes: tuple[str, ...]

    @property
    def change(self) -> float:
        """By which share the step became longer."""
        return self.step_ms / self.baseline_step_ms - 1 if self.baseline_step_ms else 0.0

    @property
    def regressed(self) -> bool:
        """Whether the step became longer by more than the threshold and than noise."""
        return self.change > self.threshold and self.step_ms - self.baseline_step_ms > self.noise_ms

    @property
    def sentence(self) -> str:
        """The comparison in one sentence."""
        steps = f"{milliseconds(self.baseline_step_ms)} to {milliseconds(self.step_ms)}"
        difference_ms = self.step_ms - self.baseline_step_ms
        if self.steps < 2:
            return f"One step says nothing about noise: the step went from {steps}; record more steps to compare."
        if abs(difference_ms) <= self.noise_ms:
            return f"No change that exceeds noise: the step went from {steps} (noise {milliseconds(self.noise_ms)})."
        part = max(self.parts_ms, key=lambda one: self.parts_ms[one] * difference_ms)
        most = f"most of it {PART_WORDS[part]} ({self.parts_ms[part]:+.3g} ms)"
        if difference_ms < 0:
            return f"Faster by {percent(-self.change)}: the step went from {steps}, {most}."
        beyond = "above" if self.regressed else "within"
        return (
            f"Slower by {percent(self.change)}: the step went from {steps}, {most}; that is {beyond} the threshold of "
            f"{percent(self.threshold)}."
        )

    def to_document(self) -> dict[str, Any]:
        """As ``headway diagnose --json`` prints it."""
        return {
            "sentence": self.sentence,
            "regressed": self.regressed,
            "baseline_step_ms": round(self.baseline_step_ms, 6),
            "change": round(self.change, 6),
            "noise_ms": round(self.noise_ms, 6),
            "threshold": self.threshold,
            "parts_ms": {part: round(value, 6) for part, value in self.parts_ms.items()},
            "new_causes": list(self.new_causes),
            "gone_causes": list(self.gone_causes),
        }


def unlike(new: Trace, baseline: Trace) -> str:
    """In words, how the jobs of two traces differ; empty where nothing shows that they do.

    Raises TraceError where they are of different frameworks: their steps are not the same thing.
    """
    if new.manifest.framework != baseline.manifest.framework:
        raise TraceError(
            "the baseline is of another framework",
            got=baseline.manifest.framework,
            expected=f"{new.manifest.framework}, as the trace is",
            fix="Compare recordings of one job.",
        )
    said = []
    if new.world_size != baseline.world_size:
        said.append(f"{new.world_size} ranks against {baseline.world_size}")
    names, before = ({one.name for one in trace.model.parameters} for trace in (new, baseline))
    if names and before and names != before:
        said.append("other parameters")
    return f"These are not recordings of the same job: {' and '.join(said)}." if said else ""


def compare(new: Diagnosis, baseline: Diagnosis, threshold: float = DEFAULT_THRESHOLD) -> Comparison:
    """Hold ``new`` against ``baseline``; ``threshold`` is the share by which a step may become longer."""
    now, then = (
        mean_breakdown(list(new.breakdown.values())),
        mean_breakdown(list(baseline.breakdown.values())),
    )
    causes, earlier = _causes(new), _causes(baseline)
    return Comparison(
        baseline_step_ms=baseline.step_ms,
        step_ms=new.step_ms,
        noise_ms=SURE * math.hypot(_error(new.step_times_ms), _error(baseline.step_times_ms)),
        threshold=threshold,
        steps=min(len(new.steps), len(baseline.steps)),
        parts_ms={part: getattr(now, part) - getattr(then, part) for part in PARTS},
        new_causes=tuple(cause for cause in causes if cause not in earlier),
        gone_causes=tuple(cause for cause in earlier if cause not in causes),
    )


def _causes(diagnosis: Diagnosis) -> list[str]:
    return [one.cause for one in diagnosis.findings if one.stands_out]


def _error(times_ms: tuple[float, ...]) -> float:
    """The standard error of the mean; of one step nothing is known, so its whole length is."""
    if len(times_ms) < 2:
        return fmean(times_ms) if times_ms else 0.0
    return stdev(times_ms) / math.sqrt(len(times_ms))
