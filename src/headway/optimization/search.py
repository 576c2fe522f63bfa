"""The search over plans: strategies propose candidates, each is replayed, the fastest wins."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from headway.errors import UserError, one_line
from headway.job import Job
from headway.optimization.candidate import UNCHANGED, Candidate, exclusion, within
from headway.optimization.recut import Recut, Recuts, recuts
from headway.optimization.result import SearchResult, best_first
from headway.optimization.sizes import Size, for_script, script_micro_batches, sizes
from headway.optimization.with_passes import WithPasses, with_passes
from headway.permission import permitted
from headway.plan.permissions import check_allowed
from headway.planning.bound import OwnBounds, StepBound, bound_of, form_of, least_sent_share
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
"""So many of each strategy that were faster a plan has to be slower than for certain, before it is left out."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A plan to be replayed by ``replay``, which takes no less than ``lower_ms()`` (0 where nothing is known).

    ``always`` says that it is replayed whatever the others take, and however little time there is.
    """

    strategy: Strategy
    schedule: Schedule
    replay: Callable[[], Candidate]
    lower_ms: Callable[[], float] = lambda: 0.0
    always: bool = False


@dataclass(frozen=True, slots=True)
class Replays:
    """What was replayed, in the order in which it was asked for.

    ``pruned`` plans were not, as they are slower for certain, and ``unseen`` were not as time was up. ``refusals`` say
    why others cannot be.
    """

    candidates: tuple[Candidate, ...]
    pruned: int = 0
    unseen: int = 0
    refusals: tuple[str, ...] = ()


Progress = Callable[[int, int, str], None]
"""Is told how many of how many plans are done, and the best so far in words."""


def replay_all(
    asked: Sequence[Asked], limit: TimeLimit, progress: Progress | None = None, *, needed: str = ""
) -> Replays:
    """Replay ``asked``, strategies by turns, in each as they were asked for.

    A plan is not replayed where its bound says that it is slower, by more than ±, than ``FASTEST`` others of its
    strategy: it would be neither the best of it nor like the best. When time is up only what is ``always`` replayed is.
    What other packages' plug-ins fail at is left out with a warning. Raises PluginFaultError where that is the strategy
    ``needed``.
    """
    found: dict[int, Candidate] = {}
    of_strategy: dict[str, list[Candidate]] = defaultdict(list)
    pruned = unseen = 0
    refusals: list[str] = []
    best: Candidate | None = None
    for done, number in enumerate(_by_turns(asked), start=1):
        one = asked[number]
        if not one.always and limit.is_over():
            unseen += 1
            continue
        rivals = of_strategy[one.strategy.name]
        made = None
        try:
            if one.always or not is_slower_than_all(one, rivals):
                made = found[number] = one.replay()
        except PluginFaultError as fault:
            leave_out(fault, needed=needed)
            continue
        except UserError as refusal:  # too large, maybe: others may not be
            if one.always:
                raise
            refusals.append(str(refusal))
            continue
        if made is None:
            pruned += 1
        else:
            rivals.append(made)
            rivals.sort(key=lambda each: each.predicted_ms)
            best = made if best is None or made.predicted_ms < best.predicted_ms else best
        if progress and best:
            progress(done, len(asked), f"{best.name}, {best.predicted_ms:.1f} ms")
    return Replays(tuple(found[number] for number in sorted(found)), pruned, unseen, tuple(refusals))


def is_slower_than_all(one: Asked, rivals: Sequence[Candidate]) -> bool:
    """Whether ``one`` takes longer for certain than the ``FASTEST`` of ``rivals``, fastest first, by more than ±."""
    if len(rivals) < FASTEST:
        return False
    share = max(rival.uncertainty_ms / rival.predicted_ms for rival in rivals[:FASTEST])
    return share < 1 and one.lower_ms() * (1 - share) > rivals[FASTEST - 1].predicted_ms


def _by_turns(asked: Sequence[Asked]) -> Iterator[int]:
    """The numbers of ``asked``: those that are always replayed, then one of each strategy, then another of each."""
    turns: dict[str, int] = defaultdict(int)
    places: list[tuple[bool, int, int]] = []
    for number, each in enumerate(asked):
        places.append((not each.always, turns[each.strategy.name], number))
        turns[each.strategy.name] += 1
    return (number for _, _, number in sorted(places))


@dataclass(frozen=True)
class Asking:
    """A search of ``replayer`` under whose ``recorded`` strategy ``in_force`` was; ``bounds`` are known by strategy."""

    replayer: Replayer
    recorded: Strategy
    in_force: Schedule
    bounds: Mapping[str, OwnBounds]

    def asked(self, played_by: Replayer | Size, said: str, strategy: Strategy, schedule: Schedule) -> Asked:
        """A plan to be replayed. The recorded one, and stock DDP, always are."""
        lower_ms = partial(self._lower_ms, strategy, schedule) if played_by is self.replayer else _unknown
        always = schedule == self.in_force or strategy == stock()
        replay = partial(self._replayed, played_by, said, strategy, schedule)
        return Asked(strategy, schedule, replay, lower_ms, always=always)

    def _replayed(
        self, played_by: Replayer | Size, said: str, strategy: Strategy, schedule: Schedule
    ) -> Candidate:
        with asking("strategy", strategy):
            expected, held_bytes, is_rough = _played(played_by, strategy, schedule)
            changes = _changes(self.recorded, self.in_force, strategy, schedule)
            name = strategy.describe() + (f" ({said})" if said else "")
        other = isinstance(played_by, Size)
        return Candidate(
            name,
            strategy,
            schedule,
            expected,
            changes,
            held_bytes,
            of_other_size=other,
            peak_is_rough=is_rough,
        )

    def _lower_ms(self, strategy: Strategy, schedule: Schedule) -> float:
        """What is predicted of a plan at least. Where replay is too slow for the record, so may its bound be."""
        known = self.bounds.get(strategy.name)
        if known is None or not isinstance(schedule, BucketSchedule):
            return 0.0
        with asking("strategy", strategy):
            if plugin_of(strategy).as_run(strategy, self.replayer.job) != strategy:
                return 0.0
        return known.of(schedule).step_ms * min(
            1.0, self.replayer.recorded_step_ms / self.replayer.base.step_ms
        )


def _unknown() -> float:
    return 0.0


def bounded(proposals: Sequence[Proposal], job: Job) -> dict[str, OwnBounds]:
    """Bounds of plans of those strategies that have one, by name."""
    if len(job.stages) > 1:
        return {}
    bounds = OwnBounds(job)
    return {
        strategy.name: bounds for proposal in proposals if proposal.bound for strategy in proposal.strategies
    }


def _played(
    played_by: Replayer | Size, strategy: Strategy, schedule: Schedule
) -> tuple[Expectation, int | None, bool]:
    """What to expect of a plan, and what a rank holds and whether that is rough; of ranks that come as they will, over
    a time."""
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
        changes.append("as many collectives, of other contents or in another order")
    return tuple(changes) or UNCHANGED


NOT_RUN = "needs headway.parallelize in the script"


def candidate_strategies(
    job: Job, proposals: Iterable[Proposal], recorded: Strategy | None = None, *, needed: str = ""
) -> list[tuple[Strategy, Schedule]]:
    """Strategies worth a replay, with what they decide: each otherwise than those before it.

    ``recorded`` comes first, so that a job that was tuned by hand is never given something slower. What
    other packages' plug-ins fail at is left out with a warning; it raises PluginFaultError for the strategy ``needed``.
    """
    found: dict[tuple[str, Schedule, str], Strategy] = {}
    options = [] if recorded is None else [recorded.spelled_out(job)]
    proposed = [strategy for proposal in proposals for strategy in proposal.strategies]
    options += proposed if recorded is None else [recorded.beside(strategy) for strategy in proposed]
    for strategy in options:
        try:
            with asking("strategy", strategy):
                found.setdefault((strategy.name, decided(strategy, job), strategy.changes_training), strategy)
        except PluginFaultError as fault:
            leave_out(fault, needed=needed)
    return [(strategy, schedule) for (_, schedule, _), strategy in found.items()]


def search(
    replayer: Replayer,
    progress: Progress | None = None,
    *,
    memory_limit_bytes: int | None = None,
    others: Sequence[Replayer] = (),
    allow: Collection[str] = (),
    budget_s: float | None = None,
    prune: bool = True,
    needed: str = "",
) -> SearchResult:
    """Replay every candidate that a strategy proposes. ``progress`` is told how many of how many are done.

    Those whose own bounds say that they are slower than others of their strategy are not, unless ``prune`` is False,
    which finds the same. When ``budget_s`` seconds are over, what has been found by then is returned. Nothing is drawn
    by chance: without a budget, the same is found every time.

    With ``memory_limit_bytes`` plans are left out under which a rank needs more. ``others`` are recordings of the same
    pipeline with other numbers of micro-batches, each of which is tried too, and those between them. Plans that change
    what is trained are candidates only where ``allow`` has what permits them (``headway.permission``). What plug-ins of
    other packages fail at is left out with a warning. Raises UserError where no plan is left, for ``others`` of another
    job, for a permission that there is not, and where the strategy of the name ``needed`` fails.
    """
    check_allowed(allow)
    begun = time.perf_counter()
    job, recorded = replayer.job, replayer.recorded_strategy
    in_force, script = decided(recorded, job), script_micro_batches(recorded, job)
    limit, reproduced = TimeLimit.of(budget_s), replayer.recorded_step_ms / replayer.base.step_ms
    sized = sizes(replayer, others)
    with limited(limit):
        proposals, plans = _proposed(job, recorded, script, allow, needed=needed)
        more = [
            (each, *_proposed(each.job, recorded, script, allow, recorded_too=False, needed=needed))
            for each in sized
        ]
    bounds = bounded(proposals, job) if prune and memory_limit_bytes is None else {}
    of = Asking(replayer, recorded, in_force, bounds)
    asked = [of.asked(replayer, "", *plan) for plan in plans]
    asked += [of.asked(size, size.said, *each) for size, _, own in more for each in own]
    replays = replay_all(asked, limit, progress, needed=needed)
    candidates = list(replays.candidates)
    so_far = sorted(candidates, key=lambda each: each.predicted_ms)
    under_passes, uncut = WithPasses(), Recuts()
    with limited(limit):
        if not limit.is_over():
            own = [each for each in candidates if not each.of_other_size]
            under_passes = with_passes(replayer, own, memory_limit_bytes, allow)
            candidates += under_passes.found
        if not limit.is_over():
            uncut = recuts(replayer, [each.strategy for each in so_far if not each.of_other_size])
            candidates += [_recut(replayer, each) for each in uncut.found]
    fitting, excluded = within(candidates, memory_limit_bytes)
    ranked = best_first(fitting)
    notes = [*(proposal.note for proposal in proposals), *_left_out(job), *uncut.notes]
    notes = [note for note in notes if note]
    notes += dict.fromkeys(
        f"{candidate.strategy.name}: {said}"
        for candidate in candidates
        for said in carried_out_by(candidate.strategy, job.on.library)[1]
    )
    notes += [
        f"times of {each.count} micro-batches are interpolated {each.said}" for each in sized if each.said
    ]
    if replays.refusals:
        notes.append(
            f"{counted(len(replays.refusals), 'plan')} cannot be replayed: {one_line(replays.refusals[0])}"
        )
    if memory_limit_bytes is not None and excluded:
        notes.append(exclusion(excluded, memory_limit_bytes))
    bound_ms, bound = least_bound(
        (each, reproduced)
        for own, reproduced in (
            (
                [
                    *proposals,
                    *_as_recorded(job, in_force),
                    *(Proposal.within((), each) for each in under_passes.bounds),
                ],
                reproduced,
            ),
            *((own, size.reproduced) for size, own, _ in more),
        )
        for each in own
    )
    return SearchResult(
        baseline_ms=replayer.recorded_step_ms,
        replayed_ms=replayer.base.step_ms,
        candidates=tuple(each for each in ranked if each.is_runnable),
        bound_ms=bound_ms,
        elapsed_s=time.perf_counter() - begun,
        notes=tuple(notes),
        excluded=tuple(excluded),
        bound=bound,
        pruned=replays.pruned,
        unseen=replays.unseen,
        cut_short=limit.cut_short,
        for_other_scripts=tuple(each for each in ranked if not each.is_runnable),
    )


def _permitted(made: Proposal, allow: Collection[str]) -> Proposal:
    """What is left of a proposal with what the user has permitted."""
    kept = tuple(strategy for strategy in made.strategies if permitted(strategy.permissions, allow))
    return replace(made, strategies=kept, note=made.note * permitted({made.about_permitted} - {""}, allow))


def _proposed(
    job: Job,
    recorded: Strategy,
    script: int | None,
    allow: Collection[str],
    *,
    recorded_too: bool = True,
    needed: str = "",
) -> tuple[list[Proposal], list[tuple[Strategy, Schedule]]]:
    """What strategies propose for ``job``, of a script whose batches are split into ``script`` micro-batches."""

    def proposal(plugin: StrategyPlugin[Any]) -> Proposal | None:
        if not fits(job, plugin.policy):
            return None
        made = _permitted(proposal_of(plugin, job), allow)
        return replace(made, strategies=tuple(for_script(strategy, script) for strategy in made.strategies))

    with times_in_range():
        proposals = [each for _, each in ask(proposal, needed=needed) if each is not None]
    if recorded_too:
        return proposals, candidate_strategies(job, proposals, recorded, needed=needed)
    others = [replace(each, strategies=tuple(map(recorded.beside, each.strategies))) for each in proposals]
    return proposals, candidate_strategies(job, others, needed=needed)


def _recut(replayer: Replayer, found: Recut) -> Candidate:
    simulation = found.simulation
    return Candidate(
        found.name, found.strategy, simulation.graph.schedule, replayer.expect(simulation),
        (found.change, NOT_RUN), simulation.peak_bytes, found.job,
        peak_is_rough=simulation.peak_is_rough,
    )  # fmt: skip


def _left_out(job: Job) -> list[str]:
    """Why strategies for models that are cut otherwise were not considered."""
    if job.world_size == 1:
        return []
    return [why for _, why in ask(lambda plugin: "" if fits(job, plugin.policy) else plugin.left_out(job))]


def least_bound(proposals: Iterable[tuple[Proposal, float]]) -> tuple[float, StepBound | None]:
    """What no candidate can beat, of whatever strategy, and why; the latter is None where that is not known.

    Of each proposal's job the recorded step is so many times its replay. Where replay is too slow for the record, so
    are the links and times that bounds are made of.
    """
    scaled = [(each, min(1.0, reproduced)) for each, reproduced in proposals]
    least, factor = min(scaled, key=lambda one: one[0].bound_ms * one[1])
    return least.bound_ms * factor, None if least.bound is None else least.bound.scaled(factor)


def _as_recorded(job: Job, schedule: Schedule) -> list[Proposal]:
    """The bound of the recorded plan where that sends gradients in fewer bytes than any that is proposed."""
    if not isinstance(schedule, BucketSchedule):
        return []
    share = least_sent_share(schedule)
    return [Proposal.within((), bound_of(job, form_of(schedule), sent_share=share))] if share < 1 else []
