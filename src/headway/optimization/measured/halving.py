"""Successive halving: who is measured next and for how long, and who has won.

Contenders run one after the other, a round at a time, the order turned round from round to round so that a drift of the
machine hits all alike. After each round the faster half goes on and runs twice as long (Jamieson and Talwalkar, 2016).
The plans that the job would be left with run in every round; the first of them is the reference. As the machine drifts
from round to round, contenders are compared by their steps beside the reference's in the same rounds, never by
milliseconds of different rounds. One that was dropped runs again if it turns out to be ahead of those that went on, so
that none is ahead of the winner at the end. Nothing here runs anything by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

OUTLYING = 2.0
"""Steps of more than so many times the median of their run count for nothing: something disturbed them."""
LEAST_ROUNDS = 2  # that a winner has run in
MOST_DOUBLINGS = 4
DIGITS = 9  # of ratios that are more than rounding
LEAST_STEPS, MOST_STEPS = 10, 200  # of a run of the first round
FIRST_ROUND_MS = 2000.0  # of timed steps in a run of the first round


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
