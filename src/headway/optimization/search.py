"""Searches for the fastest plan: strategies propose candidates, and each candidate is replayed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from headway.bound import PlanBounds, StepBound, bound_of, form_of, least_sent_share
from headway.errors import UserError, one_line
from headway.job import Job
from headway.optimization.candidate import UNCHANGED, Candidate, exclusion, within
from headway.optimization.recut import Recut, Recuts, recuts
from headway.optimization.result import SearchResult, best_first
from headway.optimization.sizes import Size, for_script, script_micro_batches, sizes
from headway.optimization.with_passes import WithPasses, with_passes
from headway.permission import permitted
from headway.plan.permissions import check_allowed
from headway.plugins import PluginFaultError, asking, leave_out
from headway.replayer.replayer import Replayer
from headway.scheduling.buckets import BucketSchedule
from headway.scheduling.schedule import Schedule
from headway.simulator.expectation import Expectation
from headway.simulator.memory import peak_bytes, peak_is_rough
from headway.simulator.simulate import times_in_range
from headway.strategies.base import Strategy, decided, fits
from headway.strategies.plugin import Proposal, StrategyPlugin, proposal_of
from headway.strategies.registry import ask, carried_out_by, plugin_of, stock
from headway.time_limit import TimeLimit, limited
from headway.units import counted

FASTEST = 3
"""Prune a plan only if it is provably slower than this many plans of its strategy."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A plan that ``replay`` evaluates; its step takes at least ``lower_ms()`` (0 if no bound is known).

    If ``always``, the plan is never pruned and is replayed even when time is up.
    """

    strategy: Strategy
    schedule: Schedule
    replay: Callable[[], Candidate]
    lower_ms: Callable[[], float] = lambda: 0.0
    always: bool = False


@dataclass(frozen=True, slots=True)
class Replays:
    """The replayed candidates, in the order of the evaluations.

    ``pruned`` counts provably slower plans, ``unseen`` those for which there was no time. ``refusals`` are the errors of
    plans that cannot be replayed.
    """

    candidates: tuple[Candidate, ...]
    pruned: int = 0
    unseen: int = 0
    refusals: tuple[str, ...] = ()


Progress = Callable[[int, int, str], None]
"""Called with the number of plans done, the total, and a description of the best so far."""


def replay_all(
    evaluations: Sequence[Evaluation], limit: TimeLimit, progress: Progress | None = None, *, needed: str = ""
) -> Replays:
    """Replay ``evaluations``, alternating between strategies, in order within each strategy.

    Skips a plan whose bound is slower, by more than ±, than ``FASTEST`` plans of its strategy: it can neither be the
    best of them nor tie with it. When time is up, only evaluations with ``always`` still run. Plans of failing
    third-party plugins are skipped with a warning; raises PluginFaultError if the strategy ``needed`` fails.
    """
    replayed: dict[int, Candidate] = {}
    of_strategy: dict[str, list[Candidate]] = defaultdict(list)
    pruned = unseen = 0
    refusals: list[str] = []
    best: Candidate | None = None
    for done, number in enumerate(_by_turns(evaluations), start=1):
        evaluation = evaluations[number]
        if not evaluation.always and limit.is_over():
            unseen += 1
            continue
        rivals = of_strategy[evaluation.strategy.name]
        candidate = None
        try:
            if evaluation.always or not is_slower_than_all(evaluation, rivals):
                candidate = replayed[number] = evaluation.replay()
        except PluginFaultError as fault:
            leave_out(fault, needed=needed)
            continue
        except UserError as refusal:  # too large, perhaps; smaller plans may still work
            if evaluation.always:
                raise
            refusals.append(str(refusal))
            continue
        if candidate is None:
            pruned += 1
        else:
            rivals.append(candidate)
            rivals.sort(key=lambda rival: rival.predicted_ms)
            best = candidate if best is None or candidate.predicted_ms < best.predicted_ms else best
        if progress and best:
            progress(done, len(evaluations), f"{best.name}, {best.predicted_ms:.1f} ms")
    return Replays(tuple(replayed[number] for number in sorted(replayed)), pruned, unseen, tuple(refusals))


def is_slower_than_all(evaluation: Evaluation, rivals: Sequence[Candidate]) -> bool:
    """Whether the bound exceeds, by more than ±, the times of the first ``FASTEST`` of ``rivals`` (sorted)."""
    if len(rivals) < FASTEST:
        return False
    share = max(rival.uncertainty_ms / rival.predicted_ms for rival in rivals[:FASTEST])
    return share < 1 and evaluation.lower_ms() * (1 - share) > rivals[FASTEST - 1].predicted_ms


def _by_turns(evaluations: Sequence[Evaluation]) -> Iterator[int]:
    """Indices of ``evaluations``: those with ``always`` first, then round-robin over strategies."""
    turns: dict[str, int] = defaultdict(int)
    places: list[tuple[bool, int, int]] = []
    for number, evaluation in enumerate(evaluations):
        places.append((not evaluation.always, turns[evaluation.strategy.name], number))
        turns[evaluation.strategy.name] += 1
    return (number for _, _, number in sorted(places))


@dataclass(frozen=True)
class CandidateEvaluator:
    """Makes evaluations of plans for one recording; ``bounds`` has the lower bounds by strategy, where known."""

    replayer: Replayer
    recorded: Strategy
    in_force: Schedule
    bounds: Mapping[str, PlanBounds]

    def evaluation(
        self, played_by: Replayer | Size, origin: str, strategy: Strategy, schedule: Schedule
    ) -> Evaluation:
        """The evaluation of a plan. The recorded plan and stock DDP are never skipped."""
        lower_ms = partial(self._lower_ms, strategy, schedule) if played_by is self.replayer else _unknown
        always = schedule == self.in_force or strategy == stock()
        replay = partial(self._replayed, played_by, origin, strategy, schedule)
        return Evaluation(strategy, schedule, replay, lower_ms, always=always)

    def _replayed(
        self, played_by: Replayer | Size, origin: str, strategy: Strategy, schedule: Schedule
    ) -> Candidate:
        with asking("strategy", strategy):
            expected, held_bytes, is_rough = _played(played_by, strategy, schedule)
            changes = _changes(self.recorded, self.in_force, strategy, schedule)
            name = strategy.describe() + (f" ({origin})" if origin else "")
        is_other_size = isinstance(played_by, Size)
        return Candidate(
            name,
            strategy,
            schedule,
            expected,
            changes,
            held_bytes,
            of_other_size=is_other_size,
            peak_is_rough=is_rough,
        )

    def _lower_ms(self, strategy: Strategy, schedule: Schedule) -> float:
        """A lower bound of the plan's prediction, scaled down if replay is slower than the recording."""
        bounds = self.bounds.get(strategy.name)
        if bounds is None or not isinstance(schedule, BucketSchedule):
            return 0.0
        with asking("strategy", strategy):
            if plugin_of(strategy).as_run(strategy, self.replayer.job) != strategy:
                return 0.0
        return bounds.of(schedule).step_ms * min(
            1.0, self.replayer.recorded_step_ms / self.replayer.base.step_ms
        )


def _unknown() -> float:
    return 0.0


def bounded(proposals: Sequence[Proposal], job: Job) -> dict[str, PlanBounds]:
    """Lower bounds by strategy name, for the strategies that have one."""
    if len(job.stages) > 1:
        return {}
    bounds = PlanBounds(job)
    return {
        strategy.name: bounds for proposal in proposals if proposal.bound for strategy in proposal.strategies
    }


def _played(
    played_by: Replayer | Size, strategy: Strategy, schedule: Schedule
) -> tuple[Expectation, int | None, bool]:
    """The expected step, the peak memory, and whether that is rough.

    For asynchronous strategies, the step is simulated over a time horizon.
    """
    if isinstance(played_by, Replayer) and (outcome := played_by.replay_horizon(strategy)) is not None:
        job = played_by.job
        held_bytes = peak_bytes(job, strategy, schedule) if job.has_parameters else None
        return played_by.expect_outcome(outcome), held_bytes, peak_is_rough(job, strategy, schedule)
    played = played_by.replay(strategy)
    return played_by.expect(played), played.peak_bytes, played.peak_is_rough


def _changes(before: Strategy, had: Schedule, after: Strategy, has: Schedule) -> tuple[str, ...]:
    changes = []
    if before.name != after.name:
        changes.append(f"{after.name} instead of {before.name}")
    if had.parts != has.parts:
        same_kind = isinstance(has, type(had))
        changes.append(f"{has.parts} instead of {had.collectives if same_kind else had.parts}")
    changes += plugin_of(after).explain(before, after)
    if not changes and had != has:
        changes.append("the same number of collectives, with other contents or in another order")
    return tuple(changes) or UNCHANGED


NOT_RUN = "needs headway.parallelize in the script"


def candidate_strategies(
    job: Job, proposals: Iterable[Proposal], recorded: Strategy | None = None, *, needed: str = ""
) -> list[tuple[Strategy, Schedule]]:
    """The distinct strategies to replay, with their schedules.

    ``recorded`` comes first, so that a hand-tuned job never gets a slower plan. Strategies of failing third-party
    plugins are skipped with a warning; raises PluginFaultError if the strategy ``needed`` fails.
    """
    distinct: dict[tuple[str, Schedule, str], Strategy] = {}
    options = [] if recorded is None else [recorded.spelled_out(job)]
    proposed = [strategy for proposal in proposals for strategy in proposal.strategies]
    options += proposed if recorded is None else [recorded.beside(strategy) for strategy in proposed]
    for strategy in options:
        try:
            with asking("strategy", strategy):
                distinct.setdefault(
                    (strategy.name, decided(strategy, job), strategy.changes_training), strategy
                )
        except PluginFaultError as fault:
            leave_out(fault, needed=needed)
    return [(strategy, schedule) for (_, schedule, _), strategy in distinct.items()]


def search(
    replayer: Replayer,
    progress: Progress | None = None,
    *,
    memory_limit_bytes: int | None = None,
    other_recordings: Sequence[Replayer] = (),
    allow: Collection[str] = (),
    budget_s: float | None = None,
    prune: bool = True,
    needed: str = "",
) -> SearchResult:
    """Replay all candidates that strategies propose, and rank them.

    Provably slower plans are skipped unless ``prune`` is False; the result is the same. After ``budget_s`` seconds the
    search returns what it has so far. The search is deterministic: without a budget, it always returns the same result.

    Plans that exceed ``memory_limit_bytes`` on any rank are left out. ``other_recordings`` are recordings of the same
    pipeline with other numbers of micro-batches; these numbers, and those between them, are tried too. Plans that change
    training are candidates only if ``allow`` permits them (``headway.permission``). Plans of failing third-party
    plugins are skipped with a warning. Raises UserError if no plan is left, if ``other_recordings`` are of another job,
    for an unknown permission, or if the strategy ``needed`` fails.
    """
    check_allowed(allow)
    begun = time.perf_counter()
    job, recorded = replayer.job, replayer.recorded_strategy
    in_force, script = decided(recorded, job), script_micro_batches(recorded, job)
    limit, reproduced = TimeLimit.of(budget_s), replayer.recorded_step_ms / replayer.base.step_ms
    sized = sizes(replayer, other_recordings)
    with limited(limit):
        proposals, plans = _proposed(job, recorded, script, allow, needed=needed)
        more = [
            (size, *_proposed(size.job, recorded, script, allow, recorded_too=False, needed=needed))
            for size in sized
        ]
    bounds = bounded(proposals, job) if prune and memory_limit_bytes is None else {}
    evaluator = CandidateEvaluator(replayer, recorded, in_force, bounds)
    evaluations = [evaluator.evaluation(replayer, "", *plan) for plan in plans]
    evaluations += [
        evaluator.evaluation(size, size.origin, *plan) for size, _, size_plans in more for plan in size_plans
    ]
    replays = replay_all(evaluations, limit, progress, needed=needed)
    candidates = list(replays.candidates)
    so_far = sorted(candidates, key=lambda candidate: candidate.predicted_ms)
    under_passes, uncut = WithPasses(), Recuts()
    with limited(limit):
        if not limit.is_over():
            recorded_size = [candidate for candidate in candidates if not candidate.of_other_size]
            under_passes = with_passes(replayer, recorded_size, memory_limit_bytes, allow)
            candidates += under_passes.candidates
        if not limit.is_over():
            uncut = recuts(
                replayer, [candidate.strategy for candidate in so_far if not candidate.of_other_size]
            )
            candidates += [_recut(replayer, pipeline) for pipeline in uncut.pipelines]
    fitting, excluded = within(candidates, memory_limit_bytes)
    ranked = best_first(fitting)
    notes = [*(proposal.note for proposal in proposals), *_left_out(job), *uncut.notes]
    notes = [note for note in notes if note]
    notes += dict.fromkeys(
        f"{candidate.strategy.name}: {remark}"
        for candidate in candidates
        for remark in carried_out_by(candidate.strategy, job.on.library)[1]
    )
    notes += [
        f"times of {size.count} micro-batches are interpolated {size.origin}" for size in sized if size.origin
    ]
    if replays.refusals:
        notes.append(
            f"{counted(len(replays.refusals), 'plan')} cannot be replayed: {one_line(replays.refusals[0])}"
        )
    if memory_limit_bytes is not None and excluded:
        notes.append(exclusion(excluded, memory_limit_bytes))
    bound_ms, bound = least_bound(
        (proposal, reproduced)
        for of_size, reproduced in (
            (
                [
                    *proposals,
                    *_as_recorded(job, in_force),
                    *(Proposal.within((), bound) for bound in under_passes.bounds),
                ],
                reproduced,
            ),
            *((of_size, size.reproduced) for size, of_size, _ in more),
        )
        for proposal in of_size
    )
    return SearchResult(
        baseline_ms=replayer.recorded_step_ms,
        replayed_ms=replayer.base.step_ms,
        candidates=tuple(candidate for candidate in ranked if candidate.is_runnable),
        bound_ms=bound_ms,
        elapsed_s=time.perf_counter() - begun,
        notes=tuple(notes),
        excluded=tuple(excluded),
        bound=bound,
        pruned=replays.pruned,
        unseen=replays.unseen,
        cut_short=limit.cut_short,
        for_other_scripts=tuple(candidate for candidate in ranked if not candidate.is_runnable),
    )


def _permitted(proposal: Proposal, allow: Collection[str]) -> Proposal:
    """The part of a proposal that the user permits."""
    kept = tuple(strategy for strategy in proposal.strategies if permitted(strategy.permissions, allow))
    return replace(
        proposal, strategies=kept, note=proposal.note * permitted({proposal.about_permitted} - {""}, allow)
    )


def _proposed(
    job: Job,
    recorded: Strategy,
    script: int | None,
    allow: Collection[str],
    *,
    recorded_too: bool = True,
    needed: str = "",
) -> tuple[list[Proposal], list[tuple[Strategy, Schedule]]]:
    """Proposals and plans for ``job``; the script splits its batches into ``script`` micro-batches."""

    def proposal(plugin: StrategyPlugin[Any]) -> Proposal | None:
        if not fits(job, plugin.policy):
            return None
        permitted_part = _permitted(proposal_of(plugin, job), allow)
        return replace(
            permitted_part,
            strategies=tuple(for_script(strategy, script) for strategy in permitted_part.strategies),
        )

    with times_in_range():
        proposals = [proposed for _, proposed in ask(proposal, needed=needed) if proposed is not None]
    if recorded_too:
        return proposals, candidate_strategies(job, proposals, recorded, needed=needed)
    upon_recorded = [
        replace(proposed, strategies=tuple(map(recorded.beside, proposed.strategies)))
        for proposed in proposals
    ]
    return proposals, candidate_strategies(job, upon_recorded, needed=needed)


def _recut(replayer: Replayer, recut: Recut) -> Candidate:
    simulation = recut.simulation
    return Candidate(
        recut.name, recut.strategy, simulation.graph.schedule, replayer.expect(simulation),
        (recut.change, NOT_RUN), simulation.peak_bytes, recut.job,
        peak_is_rough=simulation.peak_is_rough,
    )  # fmt: skip


def _left_out(job: Job) -> list[str]:
    """Why strategies that do not fit the job were not considered."""
    if job.world_size == 1:
        return []
    return [why for _, why in ask(lambda plugin: "" if fits(job, plugin.policy) else plugin.left_out(job))]


def least_bound(proposals: Iterable[tuple[Proposal, float]]) -> tuple[float, StepBound | None]:
    """The least step time that any candidate can reach, and why; the reason is None if unknown.

    Each proposal comes with ``reproduced`` = recorded step / replayed step of its job. If replay is slower than the
    recording, the links and times behind the bound are too slow as well, so the bound is scaled down.
    """
    scaled = [(proposal, min(1.0, reproduced)) for proposal, reproduced in proposals]
    least, factor = min(scaled, key=lambda scaled_one: scaled_one[0].bound_ms * scaled_one[1])
    return least.bound_ms * factor, None if least.bound is None else least.bound.scaled(factor)


def _as_recorded(job: Job, schedule: Schedule) -> list[Proposal]:
    """The bound of the recorded plan, if it sends gradients in fewer bytes than any proposed plan."""
    if not isinstance(schedule, BucketSchedule):
        return []
    share = least_sent_share(schedule)
    return [Proposal.within((), bound_of(job, form_of(schedule), sent_share=share))] if share < 1 else []
