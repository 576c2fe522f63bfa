"""What a search has found, and which of it to take."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headway.errors import UserError
from headway.optimization.candidate import Candidate, is_better, needed_bytes, no_other_training
from headway.plan import Plan, Prediction
from headway.planning.bound import StepBound
from headway.replayer.fidelity import is_reproduced
from headway.replayer.replayer import Replayer
from headway.simulator.expectation import SAME_SHARE
from headway.strategies import registry
from headway.strategies.base import DATA, PIPELINE, Strategy
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.registry import plugin_of, stock


def best_first(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """By predicted time; of equals the recorded plan, then less memory, fewer changes and fewer collectives."""

    def key(candidate: Candidate) -> tuple[float, int, int, int]:
        return (
            candidate.predicted_ms,
            candidate.peak_bytes or 0 if candidate.changed else -1,
            candidate.change_count,
            candidate.schedule.collectives,
        )

    return tuple(sorted(candidates, key=key))


def best_to_take(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest of ``candidates``, best first, or one that ties with it and needs less memory or fewer changes.

    Plans that train as recorded are preferred among those that tie. Memory counts where predicted peaks can be told
    apart.
    """
    fastest = candidates[0]
    tied = [candidate for candidate in candidates if is_tied(candidate, fastest)]
    tied = [each for each in tied if not each.changes_training] or tied
    least_bytes = min(needed_bytes(each) for each in tied)
    tied = [each for each in tied if (each.peak_bytes or 0) <= least_bytes]
    return min(tied, key=lambda each: each.change_count)


def is_tied(one: Candidate, other: Candidate) -> bool:
    """Whether it cannot be said which is faster.

    Predictions of one kind of strategy share most of their error: they differ by what predictions of the recorded
    strategy may be off by. Those of different kinds may be off by ± each.
    """
    if one.strategy.family == other.strategy.family:
        return abs(one.predicted_ms - other.predicted_ms) <= SAME_SHARE * other.predicted_ms
    return one.expected.like(other.expected)


def gains(candidate: Candidate) -> bool:
    """Whether it is faster than what was recorded by more than ±."""
    return not candidate.expected.may_gain_nothing


STAGES = "stages"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Candidates best first, what gains are counted from, and the bound no plan can beat.

    The recorded command can run each of ``candidates`` as it is; ``for_other_scripts`` are plans that need a change of
    the script, best first too. The recorded plan is a candidate unless it needs more memory than there is.
    ``baseline_ms`` is the recorded step, ``replayed_ms`` what replay makes of it. ``notes`` say what was left out and
    why; ``excluded`` need more memory than there is. ``bound`` says why no plan can beat ``bound_ms``, where that is
    known. ``pruned`` plans were not replayed, as their own bounds say that they are slower,
    ``unseen`` as time was up; ``cut_short`` says that others may not even have been proposed for that reason.
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
        """What was left out and why, in sentences without the last full stop."""
        return ". ".join(self.notes)

    @property
    def replayed(self) -> int:
        """How many plans were replayed."""
        return len(self.candidates) + len(self.for_other_scripts)

    @property
    def reproduction_error(self) -> float:
        """By which share the replay of the recorded plan is slower than the recording; below 0 where it is faster."""
        return self.replayed_ms / self.baseline_ms - 1

    @property
    def can_rank(self) -> bool:
        """Whether replay reproduces the recording well enough for predictions to rank plans."""
        return is_reproduced(self.reproduction_error)

    @property
    def recorded(self) -> Candidate | None:
        """The plan that was recorded; None where it needs more memory than there is."""
        return next((candidate for candidate in self.candidates if not candidate.changed), None)

    @property
    def stock(self) -> Candidate | None:
        """DDP with its default buckets; None where that was not replayed, or needs more memory than there is."""
        return next(
            (
                candidate
                for candidate in self.candidates
                if candidate.strategy == stock() and not candidate.passes
            ),
            None,
        )

    def dominated(self, candidate: Candidate) -> bool:
        """Whether another one is no slower and needs no more memory, and is better in one of both.

        Nothing that changes what is trained dominates what does not.
        """
        return any(
            is_better(each, candidate) and no_other_training(each, candidate) for each in self.candidates
        )

    def like(self, best: Candidate) -> tuple[Candidate, ...]:
        """The others that cannot be told apart from ``best``, which may be one that was made to follow its network."""
        among = self.candidates if best.is_runnable else (*self.candidates, *self.for_other_scripts)
        return tuple(
            each
            for each in among
            if each.expected is not best.expected
            and best.expected.like(each.expected)
            and no_other_training(each, best)
        )

    def best(self, strategy: str | None = None) -> Candidate:
        """The plan to take of those that the recorded command can run as it is.

        That is the recorded plan, unless another is faster by more than ±; of such plans the fastest, or one that ties
        with it and needs less memory or fewer changes. Where the recording cannot rank plans, it is the recorded plan.

        With ``strategy`` it is the best of the strategy of that name, whatever was recorded. The name of a dimension
        stands for all strategies along it. Where the recorded command can run none of it, it is one that needs a change
        of the script; ``STAGES`` asks for the best of such. Raises UserError where there is none.
        """
        if strategy is not None:
            return best_to_take(self._of(strategy))
        if not self.candidates:
            raise UserError(
                "no plan within the limit is one that the recorded script can follow as it is",
                got=f"{self.for_other_scripts[0].name}, which needs headway.parallelize in the script",
                fix="Give --strategy pipeline to have that, or raise --memory-limit.",
            )
        if self.recorded is None:
            return best_to_take(self.candidates)
        faster = [candidate for candidate in self.candidates if gains(candidate)]
        return best_to_take(faster) if faster and self.can_rank else self.recorded

    def _of(self, strategy: str) -> tuple[Candidate, ...]:
        """All of that strategy that are to be compared: there is at least one."""
        among = () if strategy == STAGES else self.candidates
        for candidates in (among, self.for_other_scripts):
            named = tuple(
                candidate for candidate in candidates if strategy in (STAGES, *names_of(candidate.strategy))
            )
            if named:
                return named
        raise UserError(
            "no plan of this strategy was found" + (f": {self.note}" if self.note else ""),
            got=strategy,
            fix="Leave out --strategy. Parameter servers need Gloo and a --cluster that headway probe measured; "
            "strategies that change what is trained need a permission, such as partial-all-reduce "
            "--allow asynchronous.",
        )


def check_strategy(strategy: str | None) -> None:
    """Raise UserError unless ``SearchResult.best`` knows this name, or it is None."""
    if strategy is not None:
        registry.check_usable(strategy)
    known = (*registry.names(), *registry.COMPOSED, DATA, STAGES)
    if strategy is not None and strategy not in known:
        raise UserError("there is no such strategy", got=strategy, expected=" or ".join(known))


def following(found: SearchResult, strategy: str | None = None) -> Candidate:
    """The best candidate, of the strategy of that name where given, that can follow its network, as one that does.

    It needs the memory of all that it goes over to.

    Raises UserError where none can.
    """
    fitting = [each.strategy for each in found.candidates]
    for candidate in found.candidates:
        adapted = plugin_of(candidate.strategy).following(candidate.strategy, fitting)
        if adapted is not None and strategy in (None, *names_of(candidate.strategy)):
            follower, among = adapted
            peaks = [each.peak_bytes for each in found.candidates if each.strategy in among]
            peak_bytes = None if None in peaks else max(peak or 0 for peak in peaks)
            return replace(candidate, name=follower.describe(), strategy=follower, peak_bytes=peak_bytes)
    raise UserError(
        "no plan can follow the job's network while it trains",
        got=" | ".join(dict.fromkeys(each.name for each in found.candidates)),
        expected="a pipeline",
        fix="Leave out --follow-network.",
    )


def names_of(strategy: Strategy) -> tuple[str, str]:
    """What a user may call it by: its own name, or the dimension of the mesh that it is for."""
    return strategy.name, strategy.dimension


def plan_of(candidate: Candidate, replayer: Replayer) -> Plan:
    """The plan file's value for a candidate. It remembers where the trace is, which settings of other tools need."""
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
