"""Measures plans in short runs when predictions cannot rank them.

Picks contenders, runs them in rounds by successive halving, and chooses the plan to use.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from headway.errors import UserError
from headway.optimization.candidate import Candidate
from headway.optimization.result import SearchResult, names_of
from headway.strategies.base import Strategy
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.pipeline.policy import RECORDED, PipelineStrategy
from headway.strategies.registry import plugin_of

MOST = 4
"""The most plans to measure when predictions cannot rank them."""


@dataclass(frozen=True, slots=True)
class Contenders:
    """The plans to measure; empty if nothing has to be measured.

    ``kept`` (the recorded plan and stock DDP) run in every round; ``plans`` have to beat the first of them.
    """

    kept: tuple[Candidate, ...] = ()
    plans: tuple[Candidate, ...] = ()

    @property
    def all(self) -> tuple[Candidate, ...]:
        """All contenders; a contender's number is its index here."""
        return (*self.kept, *self.plans)


def contenders(
    result: SearchResult, best: Candidate, count: int | None = None, strategy: str | None = None
) -> Contenders:
    """Choose the plans to measure: ``count`` of them, or those that tie with ``best``.

    If the recording cannot rank plans, any plan may be the best. The best plan of each kind comes first, so that the
    contenders are not all variants of one plan. With ``strategy``, only plans of that strategy take part.
    """
    kept = tuple(plan for plan in dict.fromkeys((result.recorded, result.stock)) if plan is not None)
    like = (best, *result.like(best))
    if count is None and not result.can_rank:
        count = MOST
    if count is None and len(like) == 1 and not (best.changed and best.expected.may_gain_nothing):
        return Contenders()
    among = result.candidates if count is not None else like
    able = [
        candidate
        for candidate in among
        if candidate not in kept
        and is_measurable(candidate)
        and strategy in (None, *names_of(candidate.strategy))
    ]
    plans = tuple(best_of_each_kind_first(able))[: MOST if count is None else count]
    return Contenders(kept, plans) if plans else Contenders()


def is_measurable(candidate: Candidate) -> bool:
    """Whether an unmodified script can run the plan for a while, with synchronous steps."""
    return candidate.is_runnable and not plugin_of(candidate.strategy).has_horizon and runs_by_plan(candidate)


def runs_by_plan(candidate: Candidate) -> bool:
    """Whether a plan file can express it; a pipeline order that was only recorded exists in the script alone."""
    strategy: Strategy = candidate.strategy
    pipeline = strategy.pipeline if isinstance(strategy, MeshStrategy) else strategy
    return not (isinstance(pipeline, PipelineStrategy) and pipeline.order == RECORDED)


def best_of_each_kind_first(ranked: Sequence[Candidate]) -> list[Candidate]:
    """Reorder the candidates: first the best of each kind, then the variants, both sorted."""
    leading: dict[tuple[object, ...], Candidate] = {}
    for candidate in ranked:
        leading.setdefault(candidate.kind, candidate)
    variants = [candidate for candidate in ranked if leading[candidate.kind] is not candidate]
    return [*leading.values(), *variants]


OUTLYING = 2.0
"""Ignore steps longer than this multiple of the run's median: something disturbed them."""
LEAST_ROUNDS = 2  # rounds that a winner has to run in
MOST_DOUBLINGS = 4
DIGITS = 9  # digits to which ratios are compared
LEAST_STEPS, MOST_STEPS = 10, 200  # steps of a run in the first round
FIRST_ROUND_MS = 2000.0  # timed part of a run in the first round


# Successive halving (Jamieson and Talwalkar, 2016).
#
# All contenders run in a round, one after the other; the order reverses each round, so that drift of the machine hits all
# alike. After each round the faster half goes on and runs twice as long. The plans that the job would otherwise keep run
# in every round; the first of them is the reference. Because the machine drifts, contenders are compared by their ratio
# to the reference in the same rounds, never by milliseconds of different rounds. A dropped contender runs again if it
# turns out to be ahead of those that went on, so that none is ahead of the winner at the end.


@dataclass(frozen=True, slots=True)
class Round:
    """Contender numbers in the order of their runs, and the number of steps to time in each run."""

    order: tuple[int, ...]
    steps: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The runs of one contender: the mean step of each run in ms, and the number of steps that count."""

    runs_ms: tuple[float, ...]
    steps: tuple[int, ...]
    error_ms: float
    """Two standard errors over all steps that count."""

    @classmethod
    def of(cls, runs: Sequence[Sequence[float]]) -> Measured:
        """Summarize the steps of each run, in ms, without the disturbed ones."""
        kept = [_undisturbed(run) for run in runs]
        means = tuple(sum(run) / len(run) for run in kept)
        squares = sum((step - mean) ** 2 for run, mean in zip(kept, means, strict=True) for step in run)
        count = sum(map(len, kept))
        error_ms = 2 * math.sqrt(squares / max(1, count - len(kept)) / count)
        return cls(means, tuple(map(len, kept)), error_ms)

    @property
    def step_ms(self) -> float:
        """The mean step over all runs."""
        return sum(mean * steps for mean, steps in zip(self.runs_ms, self.steps, strict=True)) / sum(
            self.steps
        )

    @property
    def spread_ms(self) -> float:
        """Half the range of the run means, or ``error_ms`` if that is larger."""
        return max((max(self.runs_ms) - min(self.runs_ms)) / 2, self.error_ms)


Runs = Mapping[int, Sequence[float]]
"""The results of one round: the timed steps in ms of each contender that did not fail."""


@dataclass(frozen=True, slots=True)
class Compared:
    """The ratio of a contender's step to the reference's, over the ``rounds`` in which both ran.

    ``spread`` is its uncertainty: the range over rounds, or two standard errors if that is larger. Without a reference,
    ``ratio`` is the contender's step in ms.
    """

    ratio: float
    spread: float
    rounds: int

    @property
    def is_clearly_faster(self) -> bool:
        """Whether it beats the reference by more than the uncertainty."""
        return self.ratio + self.spread < 1


def compared(so_far: Sequence[Runs], number: int, reference: int | None) -> Compared:
    """Compare a contender with ``reference`` over the rounds in which both ran (at least one)."""
    both = [runs for runs in so_far if number in runs and (reference is None or reference in runs)]
    steps = Measured.of([runs[number] for runs in both])
    if reference is None:
        return Compared(steps.step_ms, steps.spread_ms, len(both))
    beside = Measured.of([runs[reference] for runs in both])
    ratios = [ms / beside_ms for ms, beside_ms in zip(steps.runs_ms, beside.runs_ms, strict=True)]
    ratio = sum(run_ratio * count for run_ratio, count in zip(ratios, steps.steps, strict=True)) / sum(
        steps.steps
    )
    error = ratio * math.hypot(steps.error_ms / steps.step_ms, beside.error_ms / beside.step_ms)
    return Compared(ratio, max(max(ratios) - min(ratios), error), len(both))


def reference_of(kept: Collection[int]) -> int | None:
    """The contender to compare with: the first that is never dropped."""
    return min(kept, default=None)


def next_round(
    alive: Collection[int], kept: Collection[int], so_far: Sequence[Runs], step_ms: float
) -> Round | None:
    """The next round among the contenders ``alive``, or None at the end; ``kept`` run in every round.

    ``step_ms`` is an estimate of the step time. Rounds end when a single contender is left that ran ``LEAST_ROUNDS``
    times, and no dropped contender is ahead of it.
    """
    if not so_far:
        return Round(tuple(sorted(alive)), first_steps(step_ms))
    ranked = _ranked([number for number in alive if number not in kept], so_far, reference_of(kept))
    if not ranked:
        return None
    ran_last = sum(number in so_far[-1] for number in ranked)
    if ran_last <= 1 and sum(ranked[0] in runs for runs in so_far) >= LEAST_ROUNDS:
        return None
    faster = ranked[: max(1, math.ceil(ran_last / 2))]
    order = sorted((*kept, *faster), reverse=len(so_far) % 2 == 1)
    return Round(tuple(order), first_steps(step_ms) * 2 ** min(len(so_far), MOST_DOUBLINGS))


def _ranked(numbers: Sequence[int], so_far: Sequence[Runs], reference: int | None) -> list[int]:
    """Sort by ratio, fastest first; ties by number."""
    return sorted(
        numbers, key=lambda number: (round(compared(so_far, number, reference).ratio, DIGITS), number)
    )


def run_rounds(
    contenders: int,
    kept: Collection[int],
    run: Callable[[int, int], Sequence[float]],
    step_ms: float,
    after_run: Callable[[Sequence[Runs]], None] = lambda so_far: None,
) -> list[Runs]:
    """Run all rounds. ``run`` times that many steps of a contender and returns them in ms, or nothing if it failed.

    A contender that failed does not run again. ``after_run`` gets the rounds so far; the last may be incomplete.
    """
    so_far: list[Runs] = []
    alive = set(range(contenders))
    while (coming := next_round(alive, kept, so_far, step_ms)) is not None:
        runs: dict[int, Sequence[float]] = {}
        for number in coming.order:
            if steps_ms := run(number, coming.steps):
                runs[number] = steps_ms
            else:
                alive.discard(number)
            after_run([*so_far, runs])
        so_far.append(runs)
        if not runs:
            break
    return so_far


def most_runs(contenders: int, kept: int) -> int:
    """The number of runs if none fails and no dropped contender runs again."""
    left, runs, rounds = contenders - kept, 0, 0
    while left and (rounds < LEAST_ROUNDS or left > 1):
        left = math.ceil(left / 2) if rounds else left
        runs += kept + left
        rounds += 1
    return runs


def first_steps(step_ms: float) -> int:
    """The number of steps to time in a run of the first round: a few seconds, within limits."""
    return min(MOST_STEPS, max(LEAST_STEPS, math.ceil(FIRST_ROUND_MS / step_ms)))


def measured(so_far: Sequence[Runs], number: int) -> Measured:
    """The measurements of a contender over all rounds so far."""
    return Measured.of([runs[number] for runs in so_far if number in runs])


def winner(so_far: Sequence[Runs], kept: Collection[int], alive: Collection[int]) -> int:
    """The fastest contender ``alive`` that clearly beats the reference, or else the reference.

    Without a reference, the fastest contender wins.
    """
    reference = reference_of(kept)
    enough = min(LEAST_ROUNDS, len(so_far))
    able = [number for number in alive if sum(number in runs for runs in so_far) >= enough]
    if reference is not None:
        able = [number for number in able if compared(so_far, number, reference).is_clearly_faster]
    return _ranked(able, so_far, reference)[0] if able else min(kept)


def _undisturbed(steps_ms: Sequence[float]) -> list[float]:
    median_ms = sorted(steps_ms)[len(steps_ms) // 2]
    return [step for step in steps_ms if step <= OUTLYING * median_ms]


Run = Callable[[Candidate, int], Sequence[float]]
"""Trains under a plan until the given number of steps is timed, and returns them in ms. Raises UserError on failure."""
Progress = Callable[[int, int, str], None]
"""Called with the number of runs done, the total, and a description of the fastest plan so far."""


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A plan with its measurements, absolute and relative to the reference plan.

    ``step_ms`` and ``spread_ms`` scale its ratio by ``reference_ms``, the reference's mean over all rounds. They can thus
    be compared between plans even if the machine drifts. ``kept`` marks the recorded plan and stock DDP.
    """

    candidate: Candidate
    measured: Measured
    beside: Compared
    reference_ms: float
    kept: bool
    is_reference: bool

    @property
    def step_ms(self) -> float:
        """The mean step."""
        return self.beside.ratio * self.reference_ms

    @property
    def spread_ms(self) -> float:
        """The uncertainty of ``step_ms``; for the reference, the spread of its runs."""
        return self.measured.spread_ms if self.is_reference else self.beside.spread * self.reference_ms

    @property
    def as_predicted(self) -> bool:
        """Whether prediction and measurement agree within their combined ±."""
        off_ms = abs(self.candidate.predicted_ms - self.step_ms)
        return off_ms <= self.candidate.uncertainty_ms + self.spread_ms


@dataclass(frozen=True, slots=True)
class MeasuredChoice:
    """The measured ``plans``, fastest first, and the one ``taken``; ``why`` gives the reason.

    ``failed`` has the plans that could not be run, each with its error.
    """

    plans: tuple[MeasuredPlan, ...]
    taken: MeasuredPlan
    failed: tuple[tuple[Candidate, str], ...]
    runs: int
    elapsed_s: float

    @property
    def left_with(self) -> MeasuredPlan | None:
        """The reference plan, which the job would otherwise keep; None without a reference."""
        return next((plan for plan in self.plans if plan.is_reference), None)

    @property
    def keeps_recorded(self) -> bool:
        """Whether the chosen plan is the recorded one."""
        return not self.taken.candidate.changed

    @property
    def why(self) -> str:
        """The reason for the choice, in one sentence."""
        if self.left_with is None:
            return "It was the fastest in the measurement"
        if self.taken is not self.left_with:
            ratio = self.taken.beside
            return (
                f"It was {1 / ratio.ratio:.2f} times as fast as {_with_ms(self.left_with)} in the same rounds, beyond "
                "the variation between rounds"
            )
        rival = next((plan for plan in self.plans if plan is not self.taken), None)
        if rival is None:
            return "No other plan could be run"
        if rival.step_ms >= self.taken.step_ms:
            return f"No other plan was faster: {_with_ms(rival)}"
        return f"No other plan was faster by more than the variation between rounds: {_with_ms(rival)}"


def choose(
    contenders: Contenders, run: Run, step_ms: float, progress: Progress = lambda done, of, best: None
) -> MeasuredChoice:
    """Run plans in rounds until one is left, and choose it if it is clearly faster than the reference.

    ``step_ms`` is an estimate of the step time. Raises UserError if a kept plan cannot be run, because nothing is then
    left to compare with.
    """
    begun = time.perf_counter()
    every, kept = contenders.all, range(len(contenders.kept))
    of, done = most_runs(len(every), len(kept)), 0
    failed: dict[int, str] = {}

    def ran(number: int, steps: int) -> Sequence[float]:
        try:
            return run(every[number], steps)
        except UserError as failure:
            if number in kept:
                raise
            failed[number] = str(failure)
            return ()

    def after(so_far: Sequence[Runs]) -> None:
        nonlocal done
        done += 1
        if so_far[-1]:
            progress(done, max(done, of), _best_so_far(every, so_far))

    so_far = run_rounds(len(every), kept, ran, step_ms, after)
    alive = [number for number in range(len(every)) if number not in failed]
    if not alive:
        raise UserError("no plan could be run", got=failed[0], fix="Run without --measure.")
    reference = reference_of(kept)
    reference_ms = 1.0 if reference is None else measured(so_far, reference).step_ms
    plans = {
        number: MeasuredPlan(
            every[number],
            measured(so_far, number),
            compared(so_far, number, reference),
            reference_ms,
            number in kept,
            number == reference,
        )
        for number in alive
    }
    taken = plans[winner(so_far, kept, alive)]
    return MeasuredChoice(
        tuple(sorted(plans.values(), key=lambda plan: plan.step_ms)),
        taken,
        tuple((every[number], why) for number, why in failed.items()),
        done,
        time.perf_counter() - begun,
    )


def _best_so_far(every: Sequence[Candidate], so_far: Sequence[Runs]) -> str:
    """Describes the fastest plan of the current round."""
    times_ms = {number: measured(so_far[-1:], number).step_ms for number in so_far[-1]}
    best = min(times_ms, key=times_ms.__getitem__)
    return f"{every[best].short_name}, {times_ms[best]:.1f} ms"


def _with_ms(plan: MeasuredPlan) -> str:
    return f"{plan.candidate.short_name} ({plan.step_ms:.1f} ± {plan.spread_ms:.1f} ms)"
