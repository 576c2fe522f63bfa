"""Comparison: whether a job became slower since another recording of it, and where."""

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
MOST_MODULES = 12  # those that differ most
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
    """The same thing in both recordings; None where one of them does not have it."""

    name: str
    before: T | None
    after: T | None


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Baselines and the recording after them. ``changed`` are the facts that differ, by what they are.

    ``parts_before`` are the mean of all baselines, ``steps_before`` has the steps of each. Whatever else was before is
    of the ``typical`` baseline, the one of median step, by its place. ``buckets`` are in the order of the recording
    after, ``modules`` those that differ most in forward and backward together, without ``modules_left_out``.
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
    """Hold ``after`` against ``baselines``, at least one."""
    by_step = sorted(range(len(baselines)), key=lambda place: baselines[place].step_ms)
    typical = by_step[len(by_step) // 2]
    details = [one.details for one in (baselines[typical], after)]
    modules = _modules(*(detail.modules if detail is not None else () for detail in details))
    return SideBySide(
        typical=typical,
        changed=_changed(*(one.job if one is not None else None for one in details)),
        parts_before=mean_breakdown([_mean(baseline) for baseline in baselines]),
        parts_after=_mean(after),
        steps_before=tuple(_spread(one) for one in baselines),
        steps_after=_spread(after),
        buckets=_buckets(*(one.buckets if one is not None else () for one in details)),
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
    earlier = {(one.bucket, one.collective): one for one in before}
    later = {(one.bucket, one.collective): one for one in after}
    return tuple(
        Pair(f"{key[0]} {key[1]}", earlier.get(key), later.get(key))
        for key in dict.fromkeys((*later, *earlier))
    )


def _modules(before: Sequence[ModuleTimes], after: Sequence[ModuleTimes]) -> list[Pair[ModuleTimes]]:
    """All modules, those that differ most first."""
    earlier: Mapping[str, ModuleTimes] = {one.name: one for one in before}
    later: Mapping[str, ModuleTimes] = {one.name: one for one in after}
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
    "rest": "outside of the passes",
}
DEFAULT_THRESHOLD = 0.05
SURE = 2.0  # standard errors that a change has to exceed to count
ONE_RUN = 0.10  # of the step: how much runs of one job are taken to differ where only one was recorded
# Student's t, 95 % on both sides, by degrees of freedom from one on; SURE beyond.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True)
class Comparison:
    """A diagnosis held against a baseline's. Differences are new minus old, of mean steps in ms.

    ``noise_ms`` is how much two recordings of the same job may differ by chance: by what the ``baselines`` differ among
    themselves, or ``ONE_RUN`` of the step where there is one, and at least by two standard errors of the steps.
    ``steps`` is how many the shortest of the recordings has.
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
            return (
                f"No change that exceeds noise: the step went from {steps} (noise {milliseconds(self.noise_ms)})."
                f"{self._of_one_run}"
            )
        part = max(self.parts_ms, key=lambda one: self.parts_ms[one] * difference_ms)
        most = f"most of it {PART_WORDS[part]} ({self.parts_ms[part]:+.3g} ms)"
        if difference_ms < 0:
            return f"Faster by {percent(-self.change)}: the step went from {steps}, {most}.{self._of_one_run}"
        beyond = "above" if self.regressed else "within"
        return (
            f"Slower by {percent(self.change)}: the step went from {steps}, {most}; that is {beyond} the threshold of "
            f"{percent(self.threshold)}.{self._of_one_run}"
        )

    @property
    def _of_one_run(self) -> str:
        """What must be said where nothing is known of how runs differ."""
        if self.baselines > 1:
            return ""
        return (
            f" How much runs of this job differ is unknown from one baseline, and taken as {percent(ONE_RUN)}; the "
            "load of the machine may change more: give --baseline several times."
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
    names, before = ({parameter.name for parameter in trace.model.parameters} for trace in (new, baseline))
    if names and before and names != before:
        said.append("other parameters")
    return f"These are not recordings of the same job: {' and '.join(said)}." if said else ""


def compare(new: Diagnosis, *baselines: Diagnosis, threshold: float = DEFAULT_THRESHOLD) -> Comparison:
    """Hold ``new`` against one or more earlier runs; ``threshold`` is the share by which a step may become longer.

    Causes are new if no baseline has them, and gone if all of them had them.
    """
    now = mean_breakdown(list(new.breakdown.values()))
    then = mean_breakdown([mean_breakdown(list(one.breakdown.values())) for one in baselines])
    causes, earlier = _causes(new), [_causes(one) for one in baselines]
    steps_ms = [baseline.step_ms for baseline in baselines]
    within_ms = SURE * math.hypot(
        _error(new.step_times_ms),
        math.hypot(*(_error(one.step_times_ms) for one in baselines)) / len(baselines),
    )
    return Comparison(
        baseline_step_ms=fmean(steps_ms),
        step_ms=new.step_ms,
        noise_ms=max(within_ms, _between_runs_ms(steps_ms)),
        threshold=threshold,
        steps=min(len(one.steps) for one in (new, *baselines)),
        parts_ms={part: getattr(now, part) - getattr(then, part) for part in PARTS},
        new_causes=tuple(cause for cause in causes if not any(cause in own for own in earlier)),
        gone_causes=tuple(
            cause for cause in earlier[0] if cause not in causes and all(cause in own for own in earlier)
        ),
        baselines=len(baselines),
    )


def _between_runs_ms(steps_ms: Sequence[float]) -> float:
    """By how much one more run may differ from the mean of these by chance, in 19 of 20 cases (prediction interval)."""
    count = len(steps_ms)
    if count < 2:
        return ONE_RUN * fmean(steps_ms)
    sure = STUDENT[count - 2] if count - 2 < len(STUDENT) else SURE
    return sure * stdev(steps_ms) * math.sqrt(1 + 1 / count)


def _causes(diagnosis: Diagnosis) -> list[str]:
    return [finding.cause for finding in diagnosis.findings if finding.stands_out]


def _error(times_ms: tuple[float, ...]) -> float:
    """The standard error of the mean; of one step nothing is known, so its whole length is."""
    if len(times_ms) < 2:
        return fmean(times_ms) if times_ms else 0.0
    return stdev(times_ms) / math.sqrt(len(times_ms))
