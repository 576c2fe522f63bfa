"""Plans bucket schedules for a recorded step within seconds.

It starts from published fusion policies and from caps of many sizes, predicts each with ``surrogate.Predictor``, and
goes on from the best by local search. Everything is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from headway.graph.step_layout import profile_of
from headway.job import Job
from headway.network.algorithm_choices import algorithm_choices
from headway.network.link_cost import LinkCosts
from headway.scheduling.buckets import GATHER_MODES, BucketSchedule, GatherMode
from headway.strategies.decoupled.planner.drafts import (
    DraftGroups,
    ScheduleDrafter,
    ScheduleOptions,
    refine,
    starting_groups,
)
from headway.strategies.decoupled.planner.surrogate import Predictor
from headway.time_limit import time_is_up

_EARLY_GATHER_THRESHOLDS = (None, 0.0, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class PlannedSchedule:
    """A schedule and its predicted step, in ns."""

    schedule: BucketSchedule
    step_ns: float


@dataclass(frozen=True, slots=True)
class Planned:
    """The best schedules, fastest first, and the number of predictions made."""

    schedules: tuple[PlannedSchedule, ...]
    evaluated: int

    def best(self, gather: GatherMode | None = None) -> PlannedSchedule:
        """The fastest schedule, optionally of one form."""
        return next(s for s in self.schedules if gather is None or s.schedule.gather == gather)

    def predicted_anew(self, predict: Callable[[BucketSchedule], float]) -> Planned:
        """The schedules with their steps predicted again by ``predict`` (ns), fastest first."""
        again = [replace(planned, step_ns=predict(planned.schedule)) for planned in self.schedules]
        return replace(self, schedules=tuple(sorted(again, key=lambda planned: planned.step_ns)))


@dataclass(frozen=True, slots=True)
class _Draft:
    cost_ns: float
    groups: DraftGroups
    options: ScheduleOptions


def plan(
    job: Job,
    *,
    forms: Sequence[GatherMode] = GATHER_MODES,
    channels: Sequence[int] = (1, 2),
    keep: int = 2,
    effort: int = 400,
) -> Planned:
    """Plan gradient communication for ``job``, as if all ranks were like the slowest.

    For each form of gathering, each number of ``channels`` (collectives in flight) and each promising choice of
    algorithms, returns the ``keep`` best schedules, improved with at most ``effort`` predictions each. When time is up
    (``time_limit``), stops improving and skips algorithms other than rings.
    """
    model, profile, cluster = job.model, profile_of(job.steps.timelines), job.on
    costs = LinkCosts(cluster)
    drafters = [
        ScheduleDrafter(Predictor(model, profile, cluster, algorithms, costs))
        for algorithms in algorithm_choices(costs, model.size_bytes)
    ]
    results = [
        schedule
        for number, drafter in enumerate(drafters)
        if not (number and time_is_up())
        for schedule in _planned(drafter, forms, channels, keep, effort)
    ]
    results.sort(key=lambda planned: planned.step_ns)
    evaluated = sum(drafter.evaluated for drafter in drafters)
    return Planned(tuple(results), evaluated)


def _planned(
    drafter: ScheduleDrafter, forms: Sequence[GatherMode], channels: Sequence[int], keep: int, effort: int
) -> Iterator[PlannedSchedule]:
    starts = list(starting_groups(drafter))
    for form in forms:
        choices = [
            ScheduleOptions(form, channels[0], early_gather_threshold)
            for early_gather_threshold in _early_gather_thresholds(form)
        ]
        drafts = _predicted(drafter, starts, choices)
        for count in channels:
            counted = [
                _Draft(drafter.cost_ns(draft.groups, options), draft.groups, options)
                for draft in drafts[: 2 * keep]
                for options in (replace(draft.options, channels=count),)
            ]
            best = sorted(counted, key=lambda draft: draft.cost_ns)[:keep]
            yield from _improved(drafter, best, effort)


def _early_gather_thresholds(form: GatherMode) -> tuple[float | None, ...]:
    return _EARLY_GATHER_THRESHOLDS if form == "gradients" else (None,)


def _predicted(
    drafter: ScheduleDrafter, starts: Iterable[DraftGroups], choices: Sequence[ScheduleOptions]
) -> list[_Draft]:
    drafts = [
        _Draft(drafter.cost_ns(groups, options), groups, options) for groups in starts for options in choices
    ]
    return sorted(drafts, key=lambda draft: draft.cost_ns)


def _improved(drafter: ScheduleDrafter, drafts: Iterable[_Draft], effort: int) -> list[PlannedSchedule]:
    """The drafts after local search, best first, without duplicates."""
    evaluated: dict[BucketSchedule, tuple[float, float]] = {}
    for draft in drafts:
        cost_ns, groups = refine(drafter, draft.groups, draft.options, effort)
        step_ns = drafter.step_ns(groups, draft.options)
        evaluated.setdefault(drafter.schedule(groups, draft.options), (cost_ns, step_ns))
    ranked = sorted(evaluated.items(), key=lambda pair: pair[1])
    return [PlannedSchedule(schedule, step_ns) for schedule, (_, step_ns) in ranked]
