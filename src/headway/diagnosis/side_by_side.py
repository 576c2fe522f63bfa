"""Two diagnoses of one job side by side: what was changed, and where steps, buckets and modules differ."""

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
    """The recording before and the one after. ``changed`` are the facts that differ, by what they are.

    ``buckets`` are in the order of the recording after, ``modules`` are those that differ most in forward and backward
    together, ``modules_left_out`` how many others there are.
    """

    changed: tuple[Pair[Any], ...]
    parts: Pair[Breakdown]
    steps: Pair[StepSpread]
    buckets: tuple[Pair[BucketTimes], ...]
    modules: tuple[Pair[ModuleTimes], ...]
    modules_left_out: int


def side_by_side(before: Diagnosis, after: Diagnosis) -> SideBySide:
    """Hold ``after`` against ``before``."""
    details = [one.details for one in (before, after)]
    modules = _modules(*(one.modules if one is not None else () for one in details))
    return SideBySide(
        changed=_changed(*(one.job if one is not None else None for one in details)),
        parts=Pair("mean step", *(mean_breakdown(list(one.breakdown.values())) for one in (before, after))),
        steps=Pair("steps", *(_spread(one.step_times_ms or (one.step_ms,)) for one in (before, after))),
        buckets=_buckets(*(one.buckets if one is not None else () for one in details)),
        modules=modules[:MOST_MODULES],
        modules_left_out=max(len(modules) - MOST_MODULES, 0),
    )


def _changed(before: JobIdentity | None, after: JobIdentity | None) -> tuple[Pair[Any], ...]:
    if before is None or after is None:
        return ()
    pairs = (Pair(label, getattr(before, field), getattr(after, field)) for field, label in _COMPARED.items())
    return tuple(pair for pair in pairs if pair.before != pair.after)


def _spread(steps_ms: Sequence[float]) -> StepSpread:
    return StepSpread(tuple(steps_ms), *np.quantile(steps_ms, (0, 0.25, 0.5, 0.75, 1)).tolist())


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
