"""Successive halving: who is measured next and for how long, and who has won.

Contenders run one after the other, a round at a time, the order turned round from round to round so that a drift of the
machine hits all alike. After each round the slower half of those that may be dropped is, and the others run twice as
long (Jamieson and Talwalkar, 2016). What may not be dropped, as it is what the job would be left with, runs in every
round, so that the winner is compared with it over the same rounds. Nothing here runs anything by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

OUTLYING = 2.0
"""Steps of more than so many times the median of their run count for nothing: something disturbed them."""
LEAST_ROUNDS = 2  # so that each that is left has run more than once
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

    def like(self, other: Measured) -> bool:
        """Whether the two cannot be told apart: they differ by no more than the larger spread."""
        return abs(self.step_ms - other.step_ms) <= max(self.spread_ms, other.spread_ms)


Runs = Mapping[int, Sequence[float]]
"""What one round has measured: for each contender that did not fail, its timed steps in ms."""


def next_round(
    contenders: int, kept: Collection[int], so_far: Sequence[Runs], step_ms: float
) -> Round | None:
    """Who runs next, of ``contenders`` numbered from 0 of which ``kept`` are never dropped; None at the end.

    ``step_ms`` is about how long a step takes. Who failed in a round is out, but for ``kept``, without which nothing
    is decided.
    """
    if not so_far:
        return Round(tuple(range(contenders)), first_steps(step_ms))
    left = [number for number in so_far[-1] if number not in kept]
    if not left or (len(left) == 1 and len(so_far) >= LEAST_ROUNDS):
        return None
    times_ms = {number: measured(so_far, number).step_ms for number in left}
    ranked = sorted(left, key=lambda number: (times_ms[number], number))
    faster = ranked[: math.ceil(len(ranked) / 2)]
    order = sorted((*kept, *faster), reverse=len(so_far) % 2 == 1)
    return Round(tuple(order), first_steps(step_ms) * 2 ** len(so_far))


def run_rounds(
    contenders: int,
    kept: Collection[int],
    run: Callable[[int, int], Sequence[float]],
    step_ms: float,
    after_run: Callable[[Sequence[Runs]], None] = lambda so_far: None,
) -> list[Runs]:
    """All rounds; ``run`` is given a contender and a number of steps, and returns these in ms, none where it failed.

    ``after_run`` is told of the rounds so far, of which the last may be incomplete.
    """
    so_far: list[Runs] = []
    while (coming := next_round(contenders, kept, so_far, step_ms)) is not None:
        runs: dict[int, Sequence[float]] = {}
        for number in coming.order:
            if steps_ms := run(number, coming.steps):
                runs[number] = steps_ms
            after_run([*so_far, runs])
        so_far.append(runs)
    return so_far


def most_runs(contenders: int, kept: int) -> int:
    """How many runs there are if none fails."""
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


def winner(so_far: Sequence[Runs], kept: Collection[int]) -> int:
    """The fastest of those that ran in every round; of equals one of ``kept``, for which nothing changes."""
    ran = [number for number in so_far[-1] if all(number in runs for runs in so_far)]
    return min(ran, key=lambda number: (measured(so_far, number).step_ms, number not in kept, number))


def _undisturbed(steps_ms: Sequence[float]) -> list[float]:
    median_ms = sorted(steps_ms)[len(steps_ms) // 2]
    return [step for step in steps_ms if step <= OUTLYING * median_ms]
