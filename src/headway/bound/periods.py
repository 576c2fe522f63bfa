"""Splits the steps of a rank into periods, between moments at which all earlier communication has arrived.

If gradients are all-reduced during backward, that moment is the end of a step. If they are gathered during the next
forward, it is the first gradient of a backward, which is accumulated only when the step before is settled. Periods do
not overlap, whatever is in flight at the end of a step, so each can be bounded by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from headway.graph.computation import Item, Part, Point, Timeline
from headway.job import Job
from headway.model import ModelSpec

Form = Literal["all-reduce", "gradients", "parameters"]
"""When gradients are needed: "all-reduce" when backward ends; "gradients" when forward uses the parameter, which is
updated first; "parameters" also then, but the rank that holds the sum has updated the parameter."""

_NOT_COUNTED = {
    "all-reduce": frozenset({Part.OPTIMIZER}),  # counted at the optimizer's step
    "gradients": frozenset({Part.OPTIMIZER, Part.FINALIZE}),
    "parameters": frozenset({Part.OPTIMIZER, Part.FINALIZE, Part.READ}),  # ranks may each do a share of these
}


@dataclass(frozen=True, slots=True)
class Period:
    """The computation of one rank in a period, and when each gradient is ready and needed (ns).

    The gradient of ``parameter`` is ready ``released_ns[parameter]`` after the beginning; from its use on, the rank
    computes for ``after_ns[parameter]`` until the end. The optimizer steps ``step_ns`` after the beginning, or not at all
    (None). With ``halves``, the second half of the exchange carries the updated parameter, after the optimizer's step.
    """

    computation_ns: float
    released_ns: Mapping[str, float]
    after_ns: Mapping[str, float]
    step_ns: float | None
    halves: bool = False

    @classmethod
    def fastest(cls, periods: Sequence[Period]) -> Period:
        """A period that demands no more than any of ``periods`` (at least one)."""
        steps = [period.step_ns for period in periods if period.step_ns is not None]
        common = [
            name for name in periods[0].released_ns if all(name in period.released_ns for period in periods)
        ]
        return cls(
            min(period.computation_ns for period in periods),
            {name: min(period.released_ns[name] for period in periods) for name in common},
            {name: min(period.after_ns[name] for period in periods) for name in common},
            min(steps) if len(steps) == len(periods) else None,
            periods[0].halves,
        )


@dataclass(frozen=True, slots=True)
class RankPeriods:
    """The periods of one rank in order, and its computation outside of them in the steps that count (``edges_ns``).

    ``edges_ns`` is the part after the last period, minus the part of the first period before the first counted step.
    """

    periods: tuple[Period, ...]
    edges_ns: float

    @property
    def computation_ns(self) -> float:
        """The rank's computation in the steps that count."""
        return sum(period.computation_ns for period in self.periods) + self.edges_ns


def periods_of(steps: Sequence[Timeline], model: ModelSpec, form: Form) -> RankPeriods:
    """The periods of a rank that takes ``steps``, with the first step taken once more as a warm-up."""
    reader = _Reader(model, form)
    if form == "all-reduce":
        return RankPeriods(tuple(reader.read_alone(step) for step in steps), 0.0)
    reader.read(steps[0])
    counted_from_ns = reader.now_ns
    for step in steps:
        reader.read(step)
    return RankPeriods(tuple(reader.closed), reader.outside_ns - counted_from_ns)


@dataclass(slots=True)
class _Open:
    """An unfinished period. Times count from its beginning."""

    begun_ns: float
    released_ns: dict[str, float] = field(default_factory=dict)
    step_ns: float | None = None
    optimizer_ns: float = 0.0
    used_ns: dict[str, float] = field(default_factory=dict)  # by module, since the optimizer stepped
    backward_end_ns: float | None = None
    reads: bool = False


class _Reader:
    """Reads a rank's steps in order; ``closed`` are the finished periods."""

    def __init__(self, model: ModelSpec, form: Form) -> None:
        self._parameters = model.by_name
        self._total_bytes = max(1, model.size_bytes)
        self._form = form
        self._not_counted = _NOT_COUNTED[form]
        self._open = _Open(0.0)
        self._begun = False
        self._before_ns = 0.0
        self.now_ns = 0.0
        self.closed: list[Period] = []

    @property
    def outside_ns(self) -> float:
        """The time before the first period and after the last one."""
        return self._before_ns + self.now_ns - self._open.begun_ns if self._begun else self.now_ns

    def read_alone(self, step: Timeline) -> Period:
        """Read ``step`` as a period of its own."""
        self._open = _Open(self.now_ns)
        self._begun = True
        self._read(step)
        return self._close()

    def read(self, step: Timeline) -> None:
        """Continue with ``step``, whose first gradient ends a period."""
        ready = (
            index
            for index, item in enumerate(step.items)
            if item.kind == Point.READY and item.name in self._parameters
        )
        self._read(step, next(ready, -1))

    def _read(self, step: Timeline, first_gradient: int = -1) -> None:
        stepped = False
        for index, item in enumerate(step.items):
            if index == first_gradient:
                self._turn()
            self._note(item)
            if item.kind == Point.STEP and not stepped:
                stepped = True
                self._open.optimizer_ns += step.optimizer_ns
                self.now_ns += step.optimizer_ns if self._form == "all-reduce" else 0
            if item.kind not in self._not_counted:
                self.now_ns += item.duration_ns

    def _turn(self) -> None:
        if self._begun:
            self.closed.append(self._close())
        else:
            self._before_ns = self.now_ns
        self._begun = True
        self._open = _Open(self.now_ns)

    def _note(self, item: Item) -> None:
        open_ = self._open
        at_ns = self.now_ns - open_.begun_ns
        match item.kind:
            case Point.READY if item.name in self._parameters:
                open_.released_ns[item.name] = at_ns
            case Point.BACKWARD_END:
                open_.backward_end_ns = at_ns
            case Point.STEP if open_.step_ns is None:
                open_.step_ns = at_ns
            case Point.USE if open_.step_ns is not None:
                open_.used_ns.setdefault(item.name, at_ns)
            case Part.READ:
                open_.reads = True

    def _close(self) -> Period:
        open_ = self._open
        length_ns = self.now_ns - open_.begun_ns
        if self._form == "all-reduce":
            needed_ns = length_ns if open_.backward_end_ns is None else open_.backward_end_ns
            after_ns = dict.fromkeys(open_.released_ns, length_ns - needed_ns)
        else:
            after_ns = {
                name: length_ns - open_.used_ns.get(self._parameters[name].module, length_ns)
                for name in open_.released_ns
            }
        if self._form == "gradients" and open_.step_ns is not None:
            length_ns += self._add_updates(after_ns)
        return Period(length_ns, open_.released_ns, after_ns, open_.step_ns, self._form == "parameters")

    def _add_updates(self, after_ns: dict[str, float]) -> float:
        """Add the updates to ``after_ns``, and return the time of all updates.

        A parameter is updated on use, so later used ones are updated later, unless the script reads some (these may be
        updated before). Among parameters used at the same time, any may be the last.
        """
        open_ = self._open

        def own_ns(name: str) -> float:
            return open_.optimizer_ns * self._parameters[name].size_bytes / self._total_bytes

        later_ns = 0.0
        for _, used_together in groupby(
            sorted(after_ns, key=after_ns.__getitem__), dict(after_ns).__getitem__
        ):
            names = list(used_together)
            for name in names:
                after_ns[name] += own_ns(name) + (0.0 if open_.reads else later_ns)
            later_ns += sum(map(own_ns, names))
        return later_ns


@dataclass(frozen=True, slots=True)
class Ranks:
    """The computation of ranks in the steps that count, in ns: of the slowest rank, and the mean over ranks.

    ``fastest`` has, for each period, one that demands no more than the period of any rank; it is empty if ranks exchange
    gradients in different steps. ``edges_ns`` is the computation outside of periods (``RankPeriods``).
    """

    slowest_ns: float
    mean_ns: float
    fastest: Sequence[Period]
    edges_ns: float


def ranks_of(job: Job, form: Form) -> Ranks:
    """Summarize the ranks of ``job``. Unrecorded ranks act like recorded ones, perhaps shifted by some steps."""
    computation, timelines = job.steps, job.steps.timelines
    names = sorted(timelines)
    by_chance = min(1.0, job.incidents.slow_factor) if job.incidents.slow_share else 1.0
    alike = Counter(
        (rank if rank in timelines else names[rank % len(names)], computation.factor_of(rank) * by_chance)
        for rank in range(job.world_size)
    )
    scaled = [
        [step.scaled(factor) if factor != 1.0 else step for step in timelines[rank]] for rank, factor in alike
    ]
    any_step_first = job.world_size > len(timelines)
    by_rank = [
        [
            periods_of(steps[first:] + steps[:first], job.model, form)
            for first in (range(len(steps)) if any_step_first else (0,))
        ]
        for steps in scaled
    ]
    computed_ns = [min(rank.computation_ns for rank in rank_steps) for rank_steps in by_rank]
    total_ns = sum(own_ns * count for own_ns, count in zip(computed_ns, alike.values(), strict=True))
    every = [rank for rank_steps in by_rank for rank in rank_steps]
    fastest: list[Period] = []
    if len({len(rank.periods) for rank in every}) == 1:
        fastest = [Period.fastest(periods) for periods in zip(*(rank.periods for rank in every), strict=True)]
        if any_step_first:
            fastest = [Period.fastest([period for rank in every for period in rank.periods])] * len(fastest)
    return Ranks(
        max(computed_ns),
        total_ns / job.world_size,
        fastest,
        min(rank.edges_ns for rank in every),
    )
