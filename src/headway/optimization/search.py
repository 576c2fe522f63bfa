"""The search over plans: strategies propose candidates, each is replayed, the fastest wins."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from headway.errors import UserError
from headway.job import Job
from headway.optimization.recut import Recut, recuts
from headway.optimization.sizes import Size, for_script, script_micro_batches, sizes
from headway.permission import check_allowed, permitted
from headway.plan import Plan, Prediction
from headway.planning.bound import StepBound, bound_of
from headway.replayer.expectation import Expectation
from headway.replayer.memory import peak_bytes
from headway.replayer.replayer import Replayer
from headway.replayer.size import times_in_range
from headway.scheduling.buckets import BucketSchedule
from headway.scheduling.schedule import Schedule
from headway.strategies.base import PIPELINE, Strategy, fits
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.plugin import Proposal
from headway.strategies.registry import plugin_of, plugins
from headway.units import format_bytes

TIE = 0.01
PEAK_UNCERTAINTY = 0.05
"""By how much predicted peaks may be too low (benchmarks/pipeline_memory.py)."""
ROUGH_PEAK_UNCERTAINTY = 0.5
"""The same of pipelines whose stages were not recorded: what modules put out stands for what they keep."""
UNCHANGED = ("none",)
STAGES = "stages"
NOT_RUN = "needs headway.parallelize in the script"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan with what it decides for the job, and what is expected of it.

    ``peak_bytes`` is the most that one rank will hold; None where nothing is known of parameters. ``recut`` is the job
    of a pipeline that the recorded script does not train, and follows only with ``headway.parallelize``.
    """

    name: str
    strategy: Strategy
    schedule: Schedule
    expected: Expectation
    changes: tuple[str, ...]
    peak_bytes: int | None = None
    recut: Job | None = None

    @property
    def predicted_ms(self) -> float:
        """The step that it is expected to take."""
        return self.expected.step_ms

    @property
    def changed(self) -> bool:
        """Whether it differs from what was recorded."""
        return self.changes != UNCHANGED

    @property
    def changes_training(self) -> str:
        """What it changes of what is trained, in words; "" for nothing."""
        return self.strategy.changes_training

    @property
    def uncertainty_ms(self) -> float:
        """By how much that may be off."""
        return self.expected.uncertainty_ms


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Candidates best first, what gains are counted from, and the bound no plan can beat.

    ``baseline_ms`` is the recorded step, ``replayed_ms`` what replay makes of it. ``excluded`` need more memory than
    there is. ``bound`` says why no plan can beat ``bound_ms``; None for plans of which only the number is known.
    """

    baseline_ms: float
    replayed_ms: float
    candidates: tuple[Candidate, ...]
    bound_ms: float
    elapsed_s: float
    note: str = ""
    excluded: tuple[Candidate, ...] = ()
    bound: StepBound | None = None

    def dominated(self, candidate: Candidate) -> bool:
        """Whether another one is no slower and needs no more memory, and is better in one of both.

        What is predicted of a script as it is and what is not are not compared, and nothing that changes what is
        trained dominates what does not.
        """
        return any(
            is_better(each, candidate)
            for each in self.candidates
            if (each.recut is None) == (candidate.recut is None) and _no_other_training(each, candidate)
        )

    def like(self, best: Candidate) -> tuple[Candidate, ...]:
        """The others that cannot be told apart from ``best``."""
        return tuple(
            each
            for each in self.candidates
            if each is not best
            and best.expected.like(each.expected)
            and (each.recut is None or best.recut is not None)
            and _no_other_training(each, best)
        )

    def best(self, strategy: str | None = None) -> Candidate:
        """The first candidate that the recorded script can follow, or of the strategy of that name, where given.

        The name of a dimension stands for all strategies along it. Where no such candidate is one that the script can
        follow, it is one of other stages than the script's; ``STAGES`` asks for such. Raises UserError where there is
        none.
        """
        for candidate in sorted(self.candidates, key=lambda each: each.recut is not None):
            if candidate.recut is not None and strategy == STAGES:
                return candidate
            if candidate.recut is None if strategy is None else strategy in _names(candidate.strategy):
                return candidate
        if strategy is None:
            raise UserError(
                "no plan within the limit is one that the recorded script can follow as it is",
                got=f"{self.candidates[0].name}, which needs headway.parallelize in the script",
                fix="Give --strategy pipeline to have that, or raise --memory-limit.",
            )
        raise UserError(
            "no plan of this strategy was found" + (f": {self.note}" if self.note else ""),
            got=strategy,
            fix="Leave out --strategy. Parameter servers need Gloo and a --cluster that headway probe measured; "
            "strategies that change what is trained, such as partial-all-reduce, need --allow asynchronous.",
        )


def candidate_strategies(
    job: Job, proposals: Iterable[Proposal], recorded: Strategy | None = None
) -> list[tuple[Strategy, Schedule]]:
    """Strategies worth a replay, with what they decide: each otherwise than those before it.

    ``recorded`` comes first, so that a job that was tuned by hand is never given something slower.
    """
    found: dict[tuple[str, Schedule, str], Strategy] = {}
    options = [] if recorded is None else [recorded.spelled_out(job)]
    proposed = [strategy for proposal in proposals for strategy in proposal.strategies]
    options += proposed if recorded is None else [recorded.beside(strategy) for strategy in proposed]
    for strategy in options:
        found.setdefault((strategy.name, strategy.decide(job), strategy.changes_training), strategy)
    return [(strategy, schedule) for (_, schedule, _), strategy in found.items()]


def search(
    replayer: Replayer,
    progress: Callable[[int, int], None] | None = None,
    *,
    memory_limit_bytes: int | None = None,
    others: Sequence[Replayer] = (),
    allow: Collection[str] = (),
) -> SearchResult:
    """Replay every candidate that a strategy proposes. ``progress`` is told how many of how many are done.

    With ``memory_limit_bytes`` plans are left out under which a rank needs more. ``others`` are recordings of the same
    pipeline with other numbers of micro-batches, each of which is tried too, and those between them. Plans that change
    what is trained are candidates only where ``allow`` has "asynchronous". Raises UserError where no plan is left, for
    ``others`` of another job, and for a permission that there is not.
    """
    check_allowed(allow)
    begun = time.perf_counter()
    job, recorded = replayer.job, replayer.recorded_strategy
    in_force, script = recorded.decide(job), script_micro_batches(recorded, job)
    sized = sizes(replayer, others)
    proposals, decided = _proposed(job, recorded, script, allow)
    more = [(each, *_proposed(each.job, recorded, script, allow, recorded_too=False)) for each in sized]
    asked: list[tuple[Replayer | Size, str, Strategy, Schedule]] = [(replayer, "", *each) for each in decided]
    asked += [(size, size.said, *each) for size, _, own in more for each in own]
    candidates = []
    for number, (played_by, said, strategy, schedule) in enumerate(asked, start=1):
        expected, held_bytes = _played(played_by, strategy, schedule)
        changes = _changes(recorded, in_force, strategy, schedule)
        name = strategy.describe() + (f" ({said})" if said else "")
        candidates.append(Candidate(name, strategy, schedule, expected, changes, held_bytes))
        if progress:
            progress(number, len(asked))
    so_far = sorted(candidates, key=lambda each: each.predicted_ms)
    uncut = recuts(replayer, [each.strategy for each in so_far])
    candidates += [_recut(replayer, each) for each in uncut.found]
    fitting, excluded = within(candidates, memory_limit_bytes)
    notes = [*(proposal.note for proposal in proposals), *_left_out(job), *uncut.notes]
    notes = [each for each in notes if each]
    notes += [
        f"times of {each.count} micro-batches are interpolated {each.said}" for each in sized if each.said
    ]
    if memory_limit_bytes is not None and excluded:
        notes.append(exclusion(excluded, memory_limit_bytes))
    bound_ms, bound = least_bound(
        (each, reproduced)
        for own, reproduced in (
            ([*proposals, *_as_recorded(job, in_force)], replayer.recorded_step_ms / replayer.base.step_ms),
            *((own, size.reproduced) for size, own, _ in more),
        )
        for each in own
    )
    return SearchResult(
        baseline_ms=replayer.recorded_step_ms,
        replayed_ms=replayer.base.step_ms,
        candidates=_best_first(fitting, replayer.recorded_step_ms),
        bound_ms=bound_ms,
        elapsed_s=time.perf_counter() - begun,
        note=". ".join(notes),
        excluded=tuple(excluded),
        bound=bound,
    )


def _played(
    played_by: Replayer | Size, strategy: Strategy, schedule: Schedule
) -> tuple[Expectation, int | None]:
    """What to expect of a plan, and what a rank holds; of ranks that come as they will, over a time."""
    if isinstance(played_by, Replayer) and (outcome := played_by.replay_horizon(strategy)) is not None:
        job = played_by.job
        held_bytes = peak_bytes(job, strategy, schedule) if job.has_parameters else None
        return played_by.expect_outcome(outcome), held_bytes
    played = played_by.replay(strategy)
    return played_by.expect(played), played.peak_bytes


def _permitted(made: Proposal, allow: Collection[str]) -> Proposal:
    """What is left of a proposal with what the user has permitted."""
    kept = tuple(each for each in made.strategies if permitted(each.changes_training, allow))
    return replace(made, strategies=kept, note=made.note * (not made.about_permitted or bool(allow)))


def _proposed(
    job: Job, recorded: Strategy, script: int | None, allow: Collection[str], *, recorded_too: bool = True
) -> tuple[list[Proposal], list[tuple[Strategy, Schedule]]]:
    """What strategies propose for ``job``, of a script whose batches are split into ``script`` micro-batches."""
    with times_in_range():
        made = [
            _permitted(plugin.propose(job), allow)
            for plugin in plugins().values()
            if fits(job, plugin.policy)
        ]
    proposals = [
        replace(each, strategies=tuple(for_script(own, script) for own in each.strategies)) for each in made
    ]
    if recorded_too:
        return proposals, candidate_strategies(job, proposals, recorded)
    others = [replace(each, strategies=tuple(map(recorded.beside, each.strategies))) for each in proposals]
    return proposals, candidate_strategies(job, others)


def within(
    candidates: Iterable[Candidate], limit_bytes: int | None
) -> tuple[list[Candidate], list[Candidate]]:
    """Those under which no rank needs more than ``limit_bytes``, and the others.

    A predicted peak may be too low by up to ``PEAK_UNCERTAINTY``. Raises UserError where none is within the limit.
    """
    fitting: list[Candidate] = []
    excluded: list[Candidate] = []
    for each in candidates:
        fits_in = limit_bytes is None or (each.peak_bytes is not None and needed_bytes(each) <= limit_bytes)
        (fitting if fits_in else excluded).append(each)
    if limit_bytes is not None and not fitting:
        least = min(excluded, key=needed_bytes)
        raise UserError(
            "no plan keeps every rank within the memory limit",
            got=f"{format_bytes(needed_bytes(least))} for {least.name}, which needs least of {len(excluded)}",
            expected=f"at most {format_bytes(limit_bytes)}",
            fix="Raise --memory-limit, or record the job with smaller micro-batches or more stages.",
        )
    return fitting, excluded


def needed_bytes(candidate: Candidate) -> int:
    """The memory that a rank should have for it: its predicted peak, and what that may be too low by."""
    share = PEAK_UNCERTAINTY if candidate.recut is None else ROUGH_PEAK_UNCERTAINTY
    return round((candidate.peak_bytes or 0) * (1 + share))


def exclusion(excluded: Iterable[Candidate], limit_bytes: int) -> str:
    """Say what the limit has excluded."""
    named = ", ".join(f"{each.name} ({format_bytes(needed_bytes(each))})" for each in excluded)
    return f"left out, as a rank would need more than the limit of {format_bytes(limit_bytes)}: {named}"


def is_better(one: Candidate, other: Candidate) -> bool:
    """Whether ``one`` is no slower than ``other`` and needs no more memory, and is better in one of both."""
    if one.peak_bytes is None or other.peak_bytes is None:
        return False
    mine, others = (one.predicted_ms, one.peak_bytes), (other.predicted_ms, other.peak_bytes)
    return mine != others and all(a <= b for a, b in zip(mine, others, strict=True))


def _no_other_training(one: Candidate, other: Candidate) -> bool:
    """Whether ``one`` changes nothing of what is trained unless ``other`` does too."""
    return not one.changes_training or bool(other.changes_training)


def _names(strategy: Strategy) -> tuple[str, str]:
    return strategy.name, strategy.dimension


def _recut(replayer: Replayer, found: Recut) -> Candidate:
    simulation = found.simulation
    return Candidate(
        found.name, found.strategy, simulation.graph.schedule, replayer.expect(simulation),
        (found.change, NOT_RUN), simulation.peak_bytes, found.job,
    )  # fmt: skip


def _left_out(job: Job) -> list[str]:
    """Why strategies for models that are cut otherwise were not considered."""
    if job.world_size == 1:
        return []
    return [plugin.left_out(job) for plugin in plugins().values() if not fits(job, plugin.policy)]


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
    share = min(
        (each.wire_bytes / each.size_bytes for each in schedule.buckets if each.size_bytes), default=1.0
    )
    return [Proposal.within((), bound_of(job, "all-reduce", sent_share=share))] if share < 1 else []


def _best_first(candidates: list[Candidate], baseline_ms: float) -> tuple[Candidate, ...]:
    """By predicted time; of plans within TIE of each other the one with fewer buckets, and less risk, comes first.

    Of these in turn come first those that change nothing of what is trained.
    No plan that is slower than the recorded job, which took ``baseline_ms``, comes before it.
    """
    best_ms = min(candidate.predicted_ms for candidate in candidates)

    def key(candidate: Candidate) -> tuple[int, bool, bool, int, float]:
        band = int((candidate.predicted_ms / best_ms - 1) / TIE)
        slower = candidate.predicted_ms > baseline_ms
        changes = bool(candidate.changes_training)
        return band, slower, changes, candidate.schedule.collectives, candidate.predicted_ms

    return tuple(sorted(candidates, key=key))


def following(found: SearchResult, strategy: str | None = None) -> Candidate:
    """The best candidate, of the strategy of that name where given, that can follow its network, as one that does.

    It needs the memory of all that it goes over to.

    Raises UserError where none can.
    """
    fitting = [each.strategy for each in found.candidates if each.recut is None]
    for candidate in (each for each in found.candidates if each.recut is None):
        made = plugin_of(candidate.strategy).following(candidate.strategy, fitting)
        if made is not None and strategy in (None, candidate.strategy.name):
            own, among = made
            peaks = [each.peak_bytes for each in found.candidates if each.strategy in among]
            peak_bytes = None if None in peaks else max(peak or 0 for peak in peaks)
            return replace(candidate, name=own.describe(), strategy=own, peak_bytes=peak_bytes)
    raise UserError(
        "no plan can follow the job's network while it trains",
        got=" | ".join(dict.fromkeys(each.name for each in fitting)),
        expected="a pipeline",
        fix="Leave out --follow-network.",
    )


def plan_of(candidate: Candidate, replayer: Replayer) -> Plan:
    """The plan file's value for a candidate."""
    trace, strategy = replayer.trace, candidate.strategy
    prediction = Prediction(
        step_ms=candidate.predicted_ms,
        baseline_ms=candidate.expected.recorded_ms,
        uncertainty_ms=candidate.uncertainty_ms,
        peak_bytes=candidate.peak_bytes,
    )
    job = candidate.recut or replayer.job
    stages = trace.stages if candidate.recut is None else job.stages
    if isinstance(strategy, MeshStrategy):
        return Plan.on_mesh(strategy, job.mesh, stages, prediction=prediction, cluster=job.on)
    if strategy.dimension == PIPELINE:
        return Plan.pipeline(strategy, stages, ranks=trace.world_size, prediction=prediction, cluster=job.on)
    return Plan.data_parallel(
        strategy, trace.world_size, trace.model, prediction=prediction, cluster=replayer.cluster
    )


def _changes(before: Strategy, had: Schedule, after: Strategy, has: Schedule) -> tuple[str, ...]:
    changes = []
    if before.name != after.name:
        changes.append(f"{after.name} instead of {before.name}")
    if had.parts != has.parts:
        same_kind = isinstance(has, type(had))
        changes.append(f"{has.parts} instead of {had.collectives if same_kind else had.parts}")
    changes += plugin_of(after).explain(before, after)
    return tuple(changes) or UNCHANGED
