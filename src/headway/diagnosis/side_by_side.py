"""Recordings of one job side by side: what was changed, and where steps, buckets and modules differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from headway.diagnosis.breakdown import Breakdown, mean_breakdown
from headway.diagnosis.buckets import BucketTimes
from headway.diagnosis.diagnosis import Diagnosis
from headway.diagnosis.identity import JobIdentity
from headway.diagnosis.modules import ModuleTimes

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
    modules = _modules(*(one.modules if one is not None else () for one in details))
    return SideBySide(
        typical=typical,
        changed=_changed(*(one.job if one is not None else None for one in details)),
        parts_before=mean_breakdown([_mean(one) for one in baselines]),
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
