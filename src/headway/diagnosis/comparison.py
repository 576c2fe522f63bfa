"""Compares a recording with baselines of the same job: whether it became slower, by how much, and where."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Generic, TypeVar

import numpy as np

from headway.diagnosis.breakdown import PARTS, Breakdown, mean_breakdown
from headway.diagnosis.buckets import BucketTimes
from headway.diagnosis.details import JobIdentity
from headway.diagnosis.diagnosis import Diagnosis
from headway.diagnosis.findings import milliseconds, percent
from headway.diagnosis.modules import ModuleTimes
from headway.errors import TraceError
from headway.trace.format import Trace

T = TypeVar("T")
MOST_MODULES = 12
_COMPARED = {
    "command": "Command",
    "plan": "Plan in force",
    "model": "Model",
    "parameters": "Parameters",
    "dtypes": "Types of parameters",
    "world_size": "Ranks",
    "hosts": "Hosts",
    "versions": "Framework's version",
    "backends": "Backend",
    "devices": "Device",
    "threads": "Threads a rank",
    "cores": "Cores",
    "detail": "Level of detail",
    "contention": "Contention",
}


@dataclass(frozen=True, slots=True)
class StepSpread:
    """How long the steps of a recording take, in ms; a step's length is the mean over ranks."""

    steps_ms: tuple[float, ...]
    least_ms: float
    quarter_ms: float
    median_ms: float
    three_quarters_ms: float
    most_ms: float


@dataclass(frozen=True, slots=True)
class Pair(Generic[T]):
    """A value in both recordings; None where a recording lacks it."""

    name: str
    before: T | None
    after: T | None


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Baselines next to the recording after them.

    ``changed`` are the facts about the job that differ. ``parts_before`` is the mean over baselines; ``steps_before``
    has one entry per baseline. Other values "before" come from the baseline with the median step, at index
    ``typical``. ``buckets`` are in the order of the later recording. ``modules`` are those whose time changed most;
    ``modules_left_out`` counts the rest.
    """

    typical: int
    changed: tuple[Pair[Any], ...]
    parts_before: Breakdown
    parts_after: Breakdown
    steps_before: tuple[StepSpread, ...]
    steps_after: StepSpread
    buckets: tuple[Pair[BucketTimes], ...]
    modules: tuple[Pair[ModuleTimes], ...]
    modules_left_out: int


def side_by_side(baselines: Sequence[Diagnosis], after: Diagnosis) -> SideBySide:
    """Compares ``after`` with ``baselines``, of which there must be at least one."""
    by_step = sorted(range(len(baselines)), key=lambda place: baselines[place].step_ms)
    typical = by_step[len(by_step) // 2]
    details = [diagnosis.details for diagnosis in (baselines[typical], after)]
    modules = _modules(*(detail.modules if detail is not None else () for detail in details))
    return SideBySide(
        typical=typical,
        changed=_changed(*(detail.job if detail is not None else None for detail in details)),
        parts_before=mean_breakdown([_mean(baseline) for baseline in baselines]),
        parts_after=_mean(after),
        steps_before=tuple(_spread(baseline) for baseline in baselines),
        steps_after=_spread(after),
        buckets=_buckets(*(detail.buckets if detail is not None else () for detail in details)),
        modules=tuple(modules[:MOST_MODULES]),
        modules_left_out=max(len(modules) - MOST_MODULES, 0),
    )


def _changed(before: JobIdentity | None, after: JobIdentity | None) -> tuple[Pair[Any], ...]:
    if before is None or after is None:
        return ()
    pairs = (Pair(label, getattr(before, field), getattr(after, field)) for field, label in _COMPARED.items())
    return tuple(pair for pair in pairs if pair.before != pair.after)


def _mean(diagnosis: Diagnosis) -> Breakdown:
    return mean_breakdown(list(diagnosis.breakdown.values()))


def _spread(diagnosis: Diagnosis) -> StepSpread:
    steps_ms = diagnosis.step_times_ms or (diagnosis.step_ms,)
    return StepSpread(steps_ms, *np.quantile(steps_ms, (0, 0.25, 0.5, 0.75, 1)).tolist())


def _buckets(before: Sequence[BucketTimes], after: Sequence[BucketTimes]) -> tuple[Pair[BucketTimes], ...]:
    earlier = {(bucket.bucket, bucket.collective): bucket for bucket in before}
    later = {(bucket.bucket, bucket.collective): bucket for bucket in after}
    return tuple(
        Pair(f"{key[0]} {key[1]}", earlier.get(key), later.get(key))
        for key in dict.fromkeys((*later, *earlier))
    )


def _modules(before: Sequence[ModuleTimes], after: Sequence[ModuleTimes]) -> list[Pair[ModuleTimes]]:
    """All modules, sorted by how much their time changed."""
    earlier: Mapping[str, ModuleTimes] = {module.name: module for module in before}
    later: Mapping[str, ModuleTimes] = {module.name: module for module in after}
    pairs = [Pair(name, earlier.get(name), later.get(name)) for name in dict.fromkeys((*later, *earlier))]
    return sorted(pairs, key=lambda pair: -abs(_ms(pair.after) - _ms(pair.before)))


def _ms(module: ModuleTimes | None) -> float:
    return 0.0 if module is None else module.ms


PART_WORDS = {
    "computation": "in computation",
    "exposed_communication": "waiting for communication",
    "straggler_wait": "waiting for other ranks",
    "input": "waiting for input",
    "optimizer": "in the optimizer",
    "rest": "outside the training passes",
}
DEFAULT_THRESHOLD = 0.05
SURE = 2.0  # standard errors; smaller changes are noise
ONE_RUN = 0.10  # of the step: assumed variation between runs when there is only one baseline
# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom; SURE beyond.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True)
class Comparison:
    """A diagnosis compared with baselines. Differences are new minus old mean steps, in ms.

    ``noise_ms`` is how much two recordings of one job may differ by chance: estimated from the spread of the
    ``baselines``, or ``ONE_RUN`` of the step if there is only one, and at least two standard errors of the steps.
    ``steps`` is the number of steps in the shortest recording.
    """

    baseline_step_ms: float
    step_ms: float
    noise_ms: float
    threshold: float
    steps: int
    parts_ms: dict[str, float]
    new_causes: tuple[str, ...]
    gone_causes: tuple[str, ...]
    baselines: int = 1

    @property
    def change(self) -> float:
        """The relative change of the step time: 0.1 means 10 % longer."""
        return self.step_ms / self.baseline_step_ms - 1 if self.baseline_step_ms else 0.0

    @property
    def regressed(self) -> bool:
        """Whether the step became longer by more than both the threshold and noise."""
        return self.change > self.threshold and self.step_ms - self.baseline_step_ms > self.noise_ms

    @property
    def sentence(self) -> str:
        """The comparison in one sentence."""
        steps = f"{milliseconds(self.baseline_step_ms)} to {milliseconds(self.step_ms)}"
        difference_ms = self.step_ms - self.baseline_step_ms
        if self.steps < 2:
            return f"Cannot compare a single step: the step went from {steps}; record more steps to estimate noise."
        if abs(difference_ms) <= self.noise_ms:
            return (
                f"No change beyond noise: the step went from {steps} (noise {milliseconds(self.noise_ms)})."
                f"{self._single_baseline_note}"
            )
        part = max(self.parts_ms, key=lambda name: self.parts_ms[name] * difference_ms)
        most = f"most of it {PART_WORDS[part]} ({self.parts_ms[part]:+.3g} ms)"
        if difference_ms < 0:
            return f"Faster by {percent(-self.change)}: the step went from {steps}, {most}.{self._single_baseline_note}"
        beyond = "above" if self.regressed else "within"
        return (
            f"Slower by {percent(self.change)}: the step went from {steps}, {most}; this is {beyond} the threshold of "
            f"{percent(self.threshold)}.{self._single_baseline_note}"
        )

    @property
    def _single_baseline_note(self) -> str:
        """A caveat if a single baseline leaves the variation between runs unknown."""
        if self.baselines > 1:
            return ""
        return (
            f" With a single baseline, runs are assumed to vary by {percent(ONE_RUN)}; machine load may change "
            "more: pass --baseline several times."
        )

    def to_document(self) -> dict[str, Any]:
        """As ``headway diagnose --json`` prints it."""
        return {
            "sentence": self.sentence,
            "regressed": self.regressed,
            "baseline_step_ms": round(self.baseline_step_ms, 6),
            "change": round(self.change, 6),
            "noise_ms": round(self.noise_ms, 6),
            "baselines": self.baselines,
            "threshold": self.threshold,
            "parts_ms": {part: round(value, 6) for part, value in self.parts_ms.items()},
            "new_causes": list(self.new_causes),
            "gone_causes": list(self.gone_causes),
        }


def job_differences(new: Trace, baseline: Trace) -> str:
    """A warning that two traces are not of the same job; empty if nothing suggests that.

    Raises TraceError if they come from different frameworks, whose steps cannot be compared.
    """
    if new.manifest.framework != baseline.manifest.framework:
        raise TraceError(
            "the baseline was recorded with another framework",
            got=baseline.manifest.framework,
            expected=f"{new.manifest.framework}, as in the trace",
            fix="Compare recordings of one job.",
        )
    differences = []
    if new.world_size != baseline.world_size:
        differences.append(f"{new.world_size} ranks against {baseline.world_size}")
    names, before = ({parameter.name for parameter in trace.model.parameters} for trace in (new, baseline))
    if names and before and names != before:
        differences.append("different parameters")
    return f"These are not recordings of the same job: {' and '.join(differences)}." if differences else ""


def compare(new: Diagnosis, *baselines: Diagnosis, threshold: float = DEFAULT_THRESHOLD) -> Comparison:
    """Compares ``new`` with one or more earlier runs. ``threshold`` is the relative slowdown that is tolerated.

    A cause is new if no baseline has it, and gone if all baselines had it.
    """
    now = mean_breakdown(list(new.breakdown.values()))
    then = mean_breakdown([mean_breakdown(list(diagnosis.breakdown.values())) for diagnosis in baselines])
    causes, earlier = _causes(new), [_causes(diagnosis) for diagnosis in baselines]
    steps_ms = [baseline.step_ms for baseline in baselines]
    within_ms = SURE * math.hypot(
        _error(new.step_times_ms),
        math.hypot(*(_error(diagnosis.step_times_ms) for diagnosis in baselines)) / len(baselines),
    )
    return Comparison(
        baseline_step_ms=fmean(steps_ms),
        step_ms=new.step_ms,
        noise_ms=max(within_ms, _between_runs_ms(steps_ms)),
        threshold=threshold,
        steps=min(len(diagnosis.steps) for diagnosis in (new, *baselines)),
        parts_ms={part: getattr(now, part) - getattr(then, part) for part in PARTS},
        new_causes=tuple(cause for cause in causes if not any(cause in old_causes for old_causes in earlier)),
        gone_causes=tuple(
            cause
            for cause in earlier[0]
            if cause not in causes and all(cause in old_causes for old_causes in earlier)
        ),
        baselines=len(baselines),
    )


def _between_runs_ms(steps_ms: Sequence[float]) -> float:
    """The half-width of the 95 % prediction interval of one more run around the mean of these."""
    count = len(steps_ms)
    if count < 2:
        return ONE_RUN * fmean(steps_ms)
    sure = STUDENT[count - 2] if count - 2 < len(STUDENT) else SURE
    return sure * stdev(steps_ms) * math.sqrt(1 + 1 / count)


def _causes(diagnosis: Diagnosis) -> list[str]:
    return [finding.cause for finding in diagnosis.findings if finding.stands_out]


def _error(times_ms: tuple[float, ...]) -> float:
    """The standard error of the mean; for a single step its full length, because its error is unknown."""
    if len(times_ms) < 2:
        return fmean(times_ms) if times_ms else 0.0
    return stdev(times_ms) / math.sqrt(len(times_ms))
