"""Ranks the candidates of a search and chooses the plan to use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headway.bound import StepBound
from headway.errors import UserError
from headway.optimization.candidate import Candidate, is_as_faithful, is_better, needed_bytes
from headway.plan import Plan, Prediction
from headway.replayer.fidelity import is_reproduced
from headway.replayer.replayer import Replayer
from headway.simulator.expectation import SAME_SHARE
from headway.strategies import registry
from headway.strategies.base import DATA, PIPELINE, Strategy
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.registry import plugin_of, stock


def best_first(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Sort by predicted time; ties go to the recorded plan, then less memory, fewer changes, fewer collectives."""

    def key(candidate: Candidate) -> tuple[float, int, int, int]:
        return (
            candidate.predicted_ms,
            candidate.peak_bytes or 0 if candidate.changed else -1,
            candidate.change_count,
            candidate.schedule.collectives,
        )

    return tuple(sorted(candidates, key=key))


def best_to_take(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest of ``candidates`` (sorted), or a plan that ties with it but needs less memory or fewer changes.

    Among ties, plans that train as recorded come first. Memory counts only if the predicted peaks differ clearly.
    """
    fastest = candidates[0]
    tied = [candidate for candidate in candidates if is_tied(candidate, fastest)]
    tied = [candidate for candidate in tied if not candidate.changes_training] or tied
    least_bytes = min(needed_bytes(candidate) for candidate in tied)
    tied = [candidate for candidate in tied if (candidate.peak_bytes or 0) <= least_bytes]
    return min(tied, key=lambda candidate: candidate.change_count)


def is_tied(candidate: Candidate, rival: Candidate) -> bool:
    """Whether the predictions are too close to say which plan is faster.

    Predictions for one family of strategies share most of their error, so a difference above ``SAME_SHARE`` counts.
    Across families both uncertainties (±) apply.
    """
    if candidate.strategy.family == rival.strategy.family:
        return abs(candidate.predicted_ms - rival.predicted_ms) <= SAME_SHARE * rival.predicted_ms
    return candidate.expected.like(rival.expected)


def gains(candidate: Candidate) -> bool:
    """Whether the predicted gain exceeds the uncertainty (±)."""
    return not candidate.expected.may_gain_nothing


STAGES = "stages"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The ranked candidates, the recorded step that gains are measured from, and the lower bound.

    The unmodified script can run ``candidates``; ``for_other_scripts`` need changes to it. Both are sorted, best first.
    The recorded plan is a candidate unless it exceeds the memory limit. ``baseline_ms`` is the recorded step,
    ``replayed_ms`` its replay. ``notes`` say what was left out and why; ``excluded`` plans exceed the memory limit.
    ``bound`` explains why no plan can beat ``bound_ms``, if known. ``pruned`` counts plans that were not replayed
    because their bounds are slower than other plans; ``unseen`` counts plans for which there was no time.
    ``cut_short`` says that the budget ended before all plans were proposed.
    """

    baseline_ms: float
    replayed_ms: float
    candidates: tuple[Candidate, ...]
    bound_ms: float
    elapsed_s: float
    notes: tuple[str, ...] = ()
    excluded: tuple[Candidate, ...] = ()
    bound: StepBound | None = None
    pruned: int = 0
    unseen: int = 0
    cut_short: bool = False
    for_other_scripts: tuple[Candidate, ...] = ()

    @property
    def note(self) -> str:
        """The notes as one text, without the last full stop."""
        return ". ".join(self.notes)

    @property
    def replayed(self) -> int:
        """The number of plans that were replayed."""
        return len(self.candidates) + len(self.for_other_scripts)

    @property
    def reproduction_error(self) -> float:
        """The relative error of the replayed step against the recorded one; negative if replay is faster."""
        return self.replayed_ms / self.baseline_ms - 1

    @property
    def can_rank(self) -> bool:
        """Whether replay reproduces the recording closely enough to rank plans."""
        return is_reproduced(self.reproduction_error)

    @property
    def recorded(self) -> Candidate | None:
        """The recorded plan, or None if it exceeds the memory limit."""
        return next((candidate for candidate in self.candidates if not candidate.changed), None)

    @property
    def stock(self) -> Candidate | None:
        """DDP with its default buckets, or None if it was not replayed or exceeds the memory limit."""
        return next(
            (
                candidate
                for candidate in self.candidates
                if candidate.strategy == stock() and not candidate.passes
            ),
            None,
        )

    def dominated(self, candidate: Candidate) -> bool:
        """Whether some candidate is no worse in time and memory, and better in at least one.

        A plan that changes training never dominates one that does not.
        """
        return any(
            is_better(rival, candidate) and is_as_faithful(rival, candidate) for rival in self.candidates
        )

    def like(self, best: Candidate) -> tuple[Candidate, ...]:
        """The plans whose predictions tie with that of ``best``, which may be a plan that follows its network."""
        among = self.candidates if best.is_runnable else (*self.candidates, *self.for_other_scripts)
        return tuple(
            candidate
            for candidate in among
            if candidate.expected is not best.expected
            and best.expected.like(candidate.expected)
            and is_as_faithful(candidate, best)
        )

    def best(self, strategy: str | None = None) -> Candidate:
        """The plan to use with the unmodified script.

        That is the fastest plan that gains more than ± (or one that ties with it and needs less memory or fewer
        changes); the recorded plan if there is none, or if the recording cannot rank plans.

        With ``strategy``, returns the best plan of that strategy, whatever was recorded. The name of a mesh dimension
        stands for all strategies along it. If the unmodified script can run none of them, returns one that needs
        changes; ``STAGES`` asks for the best such plan. Raises UserError if there is no plan to return.
        """
        if strategy is not None:
            return best_to_take(self._of(strategy))
        if not self.candidates:
            raise UserError(
                "no plan within the memory limit runs without editing the script",
                got=f"{self.for_other_scripts[0].name}, which needs headway.parallelize in the script",
                fix="Use --strategy pipeline to select that plan, or raise --memory-limit.",
            )
        if self.recorded is None:
            return best_to_take(self.candidates)
        faster = [candidate for candidate in self.candidates if gains(candidate)]
        return best_to_take(faster) if faster and self.can_rank else self.recorded

    def _of(self, strategy: str) -> tuple[Candidate, ...]:
        """The candidates of that strategy, at least one."""
        among = () if strategy == STAGES else self.candidates
        for candidates in (among, self.for_other_scripts):
            named = tuple(
                candidate for candidate in candidates if strategy in (STAGES, *names_of(candidate.strategy))
            )
            if named:
                return named
        raise UserError(
            "there is no plan of this strategy" + (f": {self.note}" if self.note else ""),
            got=strategy,
            fix="Leave out --strategy. Parameter servers need Gloo and a --cluster from headway probe; strategies that "
            "change training need a permission: partial-all-reduce needs --allow asynchronous.",
        )


def check_strategy(strategy: str | None) -> None:
    """Raise UserError unless ``strategy`` is None or a name that ``SearchResult.best`` accepts."""
    if strategy is not None:
        registry.check_usable(strategy)
    usable = (*registry.names(), *registry.COMPOSED, DATA, STAGES)
    if strategy is not None and strategy not in usable:
        raise UserError("unknown strategy", got=strategy, expected=" or ".join(usable))


def following(result: SearchResult, strategy: str | None = None) -> Candidate:
    """The best candidate (of ``strategy``, if given) that can adapt to its network, turned into one that does.

    Its peak memory is the largest of the plans that it may switch to. Raises UserError if no candidate can adapt.
    """
    fitting = [rival.strategy for rival in result.candidates]
    for candidate in result.candidates:
        adapted = plugin_of(candidate.strategy).following(candidate.strategy, fitting)
        if adapted is not None and strategy in (None, *names_of(candidate.strategy)):
            follower, among = adapted
            peaks = [rival.peak_bytes for rival in result.candidates if rival.strategy in among]
            peak_bytes = None if None in peaks else max(peak or 0 for peak in peaks)
            return replace(candidate, name=follower.describe(), strategy=follower, peak_bytes=peak_bytes)
    raise UserError(
        "no plan can adapt to the network during training",
        got=" | ".join(dict.fromkeys(rival.name for rival in result.candidates)),
        expected="a pipeline",
        fix="Leave out --follow-network.",
    )


def names_of(strategy: Strategy) -> tuple[str, str]:
    """The names that select the strategy: its own, and its mesh dimension."""
    return strategy.name, strategy.dimension


def plan_of(candidate: Candidate, replayer: Replayer) -> Plan:
    """The plan file for a candidate. It stores the path of the trace, which ``headway settings`` reads."""
    plan = _plan_of(candidate, replayer)
    if not candidate.changed and plan.prediction is not None:
        prediction = plan.prediction.model_copy(update={"recorded": plan.digest})
        plan = plan.model_copy(update={"prediction": prediction})
    of_this_job = candidate.recut is None and plan.world_size == replayer.trace.world_size
    return plan.model_copy(update={"trace": os.path.abspath(replayer.trace.path)}) if of_this_job else plan


def _plan_of(candidate: Candidate, replayer: Replayer) -> Plan:
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
    plan = Plan.data_parallel(
        strategy, trace.world_size, trace.model, prediction=prediction, cluster=replayer.cluster
    )
    return Plan(
        **{**dict(plan), "passes": candidate.passes, "changes_training": candidate.changes_training or None}
    )
