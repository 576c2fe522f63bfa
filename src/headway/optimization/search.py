"""The search over plans: candidates are proposed by rule and by the planner, each is replayed, the fastest wins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from headway.collectives.algorithms import SERVERS
from headway.errors import UserError
from headway.graph.step_profile import profile_of
from headway.model import ModelSpec
from headway.plan import Plan, PlannedModel, Prediction
from headway.planning.bounds import step_bound
from headway.planning.planner import Planned
from headway.planning.planner import plan as plan_schedules
from headway.replayer.expectation import Expectation
from headway.replayer.replayer import Replayer
from headway.replayer.size import times_in_range
from headway.scheduling.buckets import FORMS, BucketSchedule, Gather
from headway.strategies.base import Strategy
from headway.strategies.data_parallel.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.data_parallel.decoupled.policy import DecoupledStrategy, options_of
from headway.strategies.data_parallel.parameter_server.policy import ParameterServerStrategy

TIE = 0.01
UNCHANGED = ("none",)
DDP_CAPS_MB = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0)
SERVER_CAPS_MB, SERVER_CHANNELS = (0.25, 1.0, 4.0, 16.0), (1, 2)
DECOUPLED_CAPS_BYTES = tuple(2**exponent for exponent in range(16, 27))


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan with what is expected of it."""

    name: str
    strategy: Strategy
    expected: Expectation
    changes: tuple[str, ...]

    @property
    def predicted_ms(self) -> float:
        """The step that it is expected to take."""
        return self.expected.step_ms

    @property
    def changed(self) -> bool:
        """Whether it differs from what was recorded."""
        return self.changes != UNCHANGED

    @property
    def uncertainty_ms(self) -> float:
        """By how much that may be off."""
        return self.expected.uncertainty_ms


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Candidates best first, what gains are counted from, and the bound no plan can beat.

    ``baseline_ms`` is the recorded step, ``replayed_ms`` what replay makes of it.
    """

    baseline_ms: float
    replayed_ms: float
    candidates: tuple[Candidate, ...]
    bound_ms: float
    elapsed_s: float
    note: str = ""

    def like(self, best: Candidate) -> tuple[Candidate, ...]:
        """The others that cannot be told apart from ``best``."""
        return tuple(
            each for each in self.candidates if each is not best and best.expected.like(each.expected)
        )

    def best(self, strategy: type[Strategy] | None = None) -> Candidate:
        """The first candidate, of ``strategy`` only where given. Raises UserError where there is none."""
        for candidate in self.candidates:
            if strategy is None or isinstance(candidate.strategy, strategy):
                return candidate
        raise UserError(
            "there is no plan of that strategy" + (f": {self.note}" if self.note else ""),
            fix="Leave --strategy out. Parameter servers need a --cluster that headway probe has measured, and Gloo.",
        )


def candidate_strategies(
    model: ModelSpec,
    recorded: Strategy | None = None,
    planned: Iterable[BucketSchedule] = (),
    forms: Sequence[Gather] = FORMS,
    *,
    servers: bool = False,
) -> Iterator[Strategy]:
    """Strategies worth a replay: each decides otherwise than those before it.

    ``recorded`` comes first, so that a job that was tuned by hand is never given something slower. ``planned`` are
    schedules that the planner proposes, ``forms`` what decoupled strategies may gather, ``servers`` whether parameter
    servers are among them.
    """
    seen: set[tuple[str, BucketSchedule]] = set()
    if isinstance(recorded, DecoupledStrategy):
        recorded = recorded.spelled_out(model)
    options: list[Strategy] = [] if recorded is None else [recorded]
    options += [DistributedDataParallelStrategy()]
    options += [DistributedDataParallelStrategy(bucket_cap_mb=cap) for cap in DDP_CAPS_MB]
    options += [DecoupledStrategy.model_validate(options_of(schedule, model)) for schedule in planned]
    options += [
        DecoupledStrategy(bucket_cap_bytes=cap, gather=form).spelled_out(model)
        for form in forms
        for cap in DECOUPLED_CAPS_BYTES
    ]
    if servers:
        options += [
            ParameterServerStrategy(bucket_cap_mb=cap, channels=channels)
            for channels in SERVER_CHANNELS
            for cap in SERVER_CAPS_MB
        ]
    for strategy in options:
        decided = (strategy.name, strategy.decide(model))
        if decided not in seen:
            seen.add(decided)
            yield strategy


def search(replayer: Replayer, progress: Callable[[int, int], None] | None = None) -> SearchResult:
    """Replay every candidate, the planner's best among them. ``progress`` is told how many of how many are done."""
    begun = time.perf_counter()
    forms, note = replayer.permitted
    model = replayer.trace.model
    with times_in_range():
        planned = plan_schedules(model, profile_of(replayer.timelines), replayer.cluster, forms=forms)
    schedules = [each.schedule for each in planned.schedules]
    # All push at once, which costs more than the messages by themselves: by how much only a probe can say.
    on_gloo = "gloo" in replayer.trace.manifest.ranks[0].backend
    servers = on_gloo and SERVERS in replayer.cluster.algorithms
    strategies = list(
        candidate_strategies(model, replayer.recorded_strategy, schedules, forms, servers=servers)
    )
    candidates = []
    for number, strategy in enumerate(strategies, start=1):
        expected = replayer.expect(replayer.replay(strategy))
        changes = _changes(replayer.recorded_strategy, strategy, model)
        candidates.append(Candidate(strategy.describe(), strategy, expected, changes))
        if progress:
            progress(number, len(strategies))
    return SearchResult(
        baseline_ms=replayer.recorded_step_ms,
        replayed_ms=replayer.base.step_ms,
        candidates=_best_first(candidates, model, replayer.recorded_step_ms),
        bound_ms=_bound_ms(planned, forms, replayer),
        elapsed_s=time.perf_counter() - begun,
        note=note,
    )


def _bound_ms(planned: Planned, forms: Sequence[Gather], replayer: Replayer) -> float:
    """What no candidate can beat, whether its halves are apart or not.

    Where replay is too slow for the record, so are the links and times that bounds are made of.
    """
    together = step_bound(replayer.timelines, replayer.trace.model.size_bytes, replayer.cluster)
    bound_ms = min([together.all_reduce_ms, *(planned.bounds.of(form) / 1e6 for form in forms)])
    return bound_ms * min(1.0, replayer.recorded_step_ms / replayer.base.step_ms)


def _best_first(candidates: list[Candidate], model: ModelSpec, baseline_ms: float) -> tuple[Candidate, ...]:
    """By predicted time; of plans within TIE of each other the one with fewer buckets, and less risk, comes first.

    No plan that is slower than the recorded job, which took ``baseline_ms``, comes before it.
    """
    best_ms = min(candidate.predicted_ms for candidate in candidates)

    def key(candidate: Candidate) -> tuple[int, bool, int, float]:
        band = int((candidate.predicted_ms / best_ms - 1) / TIE)
        slower = candidate.predicted_ms > baseline_ms
        return band, slower, len(candidate.strategy.decide(model).buckets), candidate.predicted_ms

    return tuple(sorted(candidates, key=key))


def plan_of(candidate: Candidate, replayer: Replayer) -> Plan:
    """The plan file's value for a candidate."""
    return Plan(
        strategy=candidate.strategy,
        world_size=replayer.trace.world_size,
        model=PlannedModel.of(replayer.trace.model),
        prediction=Prediction(
            step_ms=candidate.predicted_ms,
            baseline_ms=candidate.expected.recorded_ms,
            uncertainty_ms=candidate.uncertainty_ms,
        ),
        cluster=replayer.cluster,
    )


def _changes(before: Strategy, after: Strategy, model: ModelSpec) -> tuple[str, ...]:
    changes = []
    if before.name != after.name:
        changes.append(f"{after.name} instead of {before.name}")
    had, has = (len(strategy.decide(model).buckets) for strategy in (before, after))
    if had != has:
        changes.append(f"{has} buckets instead of {had}")
    if isinstance(after, DecoupledStrategy):
        had_form = before.gather if isinstance(before, DecoupledStrategy) else ""
        if after.gather != had_form:
            changes.append(f"{after.gather} are gathered")
    return tuple(changes) or UNCHANGED
