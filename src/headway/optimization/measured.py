"""Plans told apart by short runs where predictions cannot: contenders, successive halving, and the choice."""

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
"""So many plans are measured at most where predictions do not tell them apart."""


@dataclass(frozen=True, slots=True)
class Contenders:
    """``kept``, the recorded plan and stock DDP, are measured in every round; ``plans`` have to beat the first.

    There are none where nothing has to be measured.
    """

    kept: tuple[Candidate, ...] = ()
    plans: tuple[Candidate, ...] = ()

    @property
    def all(self) -> tuple[Candidate, ...]:
        """In the order of their numbers."""
        return (*self.kept, *self.plans)


def contenders(
    found: SearchResult, best: Candidate, count: int | None = None, strategy: str | None = None
) -> Contenders:
    """Which plans are to be measured: ``count`` of them, or those that cannot be told apart from ``best``.

    Where the recording cannot rank plans, any may be the best. Of each kind the best comes first, so that not all are
    variants of one. With ``strategy`` they are of the strategy of that name alone.
    """
    kept = tuple(fromkey for fromkey in dict.fromkeys((found.recorded, found.stock)) if fromkey is not None)
    like = (best, *found.like(best))
    if count is None and not found.can_rank:
        count = MOST
    if count is None and len(like) == 1 and not (best.changed and best.expected.may_gain_nothing):
        return Contenders()
    among = found.candidates if count is not None else like
    able = [
        each
        for each in among
        if each not in kept and is_measurable(each) and strategy in (None, *names_of(each.strategy))
    ]
    plans = tuple(best_of_each_kind_first(able))[: MOST if count is None else count]
    return Contenders(kept, plans) if plans else Contenders()


def is_measurable(candidate: Candidate) -> bool:
    """Whether an unmodified command can follow it for a while, and ranks finish its steps together."""
    return candidate.is_runnable and not plugin_of(candidate.strategy).has_horizon and runs_by_plan(candidate)


def runs_by_plan(candidate: Candidate) -> bool:
    """Whether a plan says how to run it; of an order that was only recorded, the command alone does."""
    strategy: Strategy = candidate.strategy
    pipeline = strategy.pipeline if isinstance(strategy, MeshStrategy) else strategy
    return not (isinstance(pipeline, PipelineStrategy) and pipeline.order == RECORDED)


def best_of_each_kind_first(ranked: Sequence[Candidate]) -> list[Candidate]:
    """The same candidates: first the best of each kind, then their variants, both best first."""
    leading: dict[tuple[object, ...], Candidate] = {}
    for each in ranked:
        leading.setdefault(each.kind, each)
    variants = [each for each in ranked if leading[each.kind] is not each]
    return [*leading.values(), *variants]


OUTLYING = 2.0
"""Steps of more than so many times the median of their run count for nothing: something disturbed them."""
LEAST_ROUNDS = 2  # that a winner has run in
MOST_DOUBLINGS = 4
DIGITS = 9  # of ratios that are more than rounding
LEAST_STEPS, MOST_STEPS = 10, 200  # of a run of the first round
FIRST_ROUND_MS = 2000.0  # of timed steps in a run of the first round


# Successive halving: who is measured next and for how long, and who has won.
#
# Contenders run one after the other, a round at a time, the order turned round from round to round so that a drift of the
# machine hits all alike. After each round the faster half goes on and runs twice as long (Jamieson and Talwalkar, 2016).
# The plans that the job would be left with run in every round; the first of them is the reference. As the machine drifts
# from round to round, contenders are compared by their steps beside the reference's in the same rounds, never by
# milliseconds of different rounds. One that was dropped runs again if it turns out to be ahead of those that went on, so
# that none is ahead of the winner at the end. Nothing here runs anything by itself.


@dataclass(frozen=True, slots=True)
class Round:
    """Contenders, by number, in the order in which they run, each until ``steps`` of its steps are timed."""

    order: tuple[int, ...]
    steps: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What the runs of one contender have measured: the mean of each run's steps, in ms, and of how many."""

    runs_ms: tuple[float, ...]
    steps: tuple[int, ...]
    error_ms: float
    """Two standard errors of all steps that count."""

    @classmethod
    def of(cls, runs: Sequence[Sequence[float]]) -> Measured:
        """Of the steps of each run, in ms. Those that were disturbed are left out."""
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
        """By how much runs differ: half of the range of their means, or ``error_ms`` if that is more."""
        return max((max(self.runs_ms) - min(self.runs_ms)) / 2, self.error_ms)


Runs = Mapping[int, Sequence[float]]
"""What one round has measured: for each contender that did not fail, its timed steps in ms."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A contender's step as a share of the reference's, in the ``rounds`` that both ran in.

    It may be off by ``spread``: by as much as rounds differ, or by two standard errors of the steps, if that is more.
    Without a reference it is its own step in ms.
    """

    ratio: float
    spread: float
    rounds: int

    @property
    def is_clearly_faster(self) -> bool:
        """Whether it is faster than the reference by more than that may be off."""
        return self.ratio + self.spread < 1


def compared(so_far: Sequence[Runs], number: int, reference: int | None) -> Compared:
    """A contender beside ``reference``, over the rounds in which both ran; there is at least one."""
    both = [runs for runs in so_far if number in runs and (reference is None or reference in runs)]
    steps = Measured.of([runs[number] for runs in both])
    if reference is None:
        return Compared(steps.step_ms, steps.spread_ms, len(both))
    beside = Measured.of([runs[reference] for runs in both])
    ratios = [ms / beside_ms for ms, beside_ms in zip(steps.runs_ms, beside.runs_ms, strict=True)]
    ratio = sum(each * count for each, count in zip(ratios, steps.steps, strict=True)) / sum(steps.steps)
    error = ratio * math.hypot(steps.error_ms / steps.step_ms, beside.error_ms / beside.step_ms)
    return Compared(ratio, max(max(ratios) - min(ratios), error), len(both))


def reference_of(kept: Collection[int]) -> int | None:
    """The contender that others are compared with: the first of those that are never dropped."""
    return min(kept, default=None)


def next_round(
    alive: Collection[int], kept: Collection[int], so_far: Sequence[Runs], step_ms: float
) -> Round | None:
    """Who runs next of the contenders ``alive``, of which ``kept`` run in every round; None at the end.

    ``step_ms`` is about how long a step takes. The end is when one is left that has run ``LEAST_ROUNDS`` times, and
    none that was dropped is ahead of it.
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
    """Fastest first; what differs by rounding alone, by number."""
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
    """All rounds; ``run`` is given a contender and a number of steps, and returns these in ms, none where it failed.

    Who fails once does not run again. ``after_run`` is told of the rounds so far, of which the last may be incomplete.
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
    """How many runs there are if none fails and none runs again that was dropped."""
    left, runs, rounds = contenders - kept, 0, 0
    while left and (rounds < LEAST_ROUNDS or left > 1):
        left = math.ceil(left / 2) if rounds else left
        runs += kept + left
        rounds += 1
    return runs


def first_steps(step_ms: float) -> int:
    """How many steps a run of the first round times: some seconds of them, within limits."""
    return min(MOST_STEPS, max(LEAST_STEPS, math.ceil(FIRST_ROUND_MS / step_ms)))


def measured(so_far: Sequence[Runs], number: int) -> Measured:
    """What all rounds so far have measured of a contender, which ran in the first."""
    return Measured.of([runs[number] for runs in so_far if number in runs])


def winner(so_far: Sequence[Runs], kept: Collection[int], alive: Collection[int]) -> int:
    """The reference, unless another of those ``alive`` is clearly faster: then the fastest of such.

    Without a reference it is the fastest of all.
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
"""Trains under a plan until so many steps are timed; returns these, in ms. Raises UserError where that fails."""
Progress = Callable[[int, int, str], None]
"""Is told how many of how many runs are done, and which plan is the fastest so far."""


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A plan, what its runs have measured, and the same beside the plan that the job would be left with.

    ``step_ms`` and ``spread_ms`` are as if it had run in all rounds: its share of the reference's steps, which took
    ``reference_ms`` and ran in all. So they can be compared with those of any other plan, whatever the machine did
    meanwhile. ``kept`` plans are the recorded one and stock DDP.
    """

    candidate: Candidate
    measured: Measured
    beside: Compared
    reference_ms: float
    kept: bool
    is_reference: bool

    @property
    def step_ms(self) -> float:
        """Its mean step."""
        return self.beside.ratio * self.reference_ms

    @property
    def spread_ms(self) -> float:
        """By how much that may be off; of the reference, by how much its runs differ."""
        return self.measured.spread_ms if self.is_reference else self.beside.spread * self.reference_ms

    @property
    def as_predicted(self) -> bool:
        """Whether prediction and measurement differ by no more than the ± of both together."""
        off_ms = abs(self.candidate.predicted_ms - self.step_ms)
        return off_ms <= self.candidate.uncertainty_ms + self.spread_ms


@dataclass(frozen=True, slots=True)
class MeasuredChoice:
    """``plans``, fastest first, and which of them is ``taken``.

    ``why`` says in a sentence why. ``failed`` are plans that could not be run, with the reason.
    """

    plans: tuple[MeasuredPlan, ...]
    taken: MeasuredPlan
    failed: tuple[tuple[Candidate, str], ...]
    runs: int
    elapsed_s: float

    @property
    def left_with(self) -> MeasuredPlan | None:
        """The plan that the job would be left with, beside which the others were measured; None where there is none."""
        return next((plan for plan in self.plans if plan.is_reference), None)

    @property
    def keeps_recorded(self) -> bool:
        """Whether the plan that is taken is the recorded one."""
        return not self.taken.candidate.changed

    @property
    def why(self) -> str:
        """Why that plan is taken, in a sentence."""
        if self.left_with is None:
            return "It was the fastest as measured"
        if self.taken is not self.left_with:
            ratio = self.taken.beside
            return (
                f"It was {1 / ratio.ratio:.2f} times as fast as {_with_ms(self.left_with)} in the same rounds, by more "
                "than rounds differ"
            )
        rival = next((plan for plan in self.plans if plan is not self.taken), None)
        if rival is None:
            return "No other plan could be run"
        if rival.step_ms >= self.taken.step_ms:
            return f"No other plan was faster: {_with_ms(rival)}"
        return f"No other plan was faster by more than rounds differ: {_with_ms(rival)}"


def choose(
    contenders: Contenders, run: Run, step_ms: float, progress: Progress = lambda done, of, best: None
) -> MeasuredChoice:
    """Run plans in rounds (``halving``) until one is left, and take it if it is clearly faster than the recorded one.

    ``step_ms`` is about how long a step takes. Raises UserError where a plan that is kept cannot be run: there would be
    nothing to compare with.
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
        raise UserError("no plan could be run", got=failed[0], fix="Leave out --measure.")
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
        tuple(sorted(plans.values(), key=lambda each: each.step_ms)),
        taken,
        tuple((every[number], why) for number, why in failed.items()),
        done,
        time.perf_counter() - begun,
    )


def _best_so_far(every: Sequence[Candidate], so_far: Sequence[Runs]) -> str:
    """The fastest of those that have run in the round that is on."""
    times_ms = {number: measured(so_far[-1:], number).step_ms for number in so_far[-1]}
    best = min(times_ms, key=times_ms.__getitem__)
    return f"{every[best].short_name}, {times_ms[best]:.1f} ms"


def _with_ms(plan: MeasuredPlan) -> str:
    return f"{plan.candidate.short_name} ({plan.step_ms:.1f} ± {plan.spread_ms:.1f} ms)"
