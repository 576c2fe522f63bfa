"""The choice among plans that short runs have measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.errors import UserError
from headway.optimization.candidate import Candidate
from headway.optimization.measured.contenders import Contenders
from headway.optimization.measured.halving import Measured, Runs, measured, most_runs, run_rounds, winner

Run = Callable[[Candidate, int], Sequence[float]]
"""Trains under a plan until so many steps are timed; returns these, in ms. Raises UserError where that fails."""
Progress = Callable[[int, int, str], None]
"""Is told how many of how many runs are done, and which plan is the fastest so far."""


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A plan, what its runs have measured, in how many rounds, and whether it was kept in all."""

    candidate: Candidate
    measured: Measured
    rounds: int
    kept: bool

    @property
    def as_predicted(self) -> bool:
        """Whether prediction and measurement differ by no more than the ± of both together."""
        off_ms = abs(self.candidate.predicted_ms - self.measured.step_ms)
        return off_ms <= self.candidate.uncertainty_ms + self.measured.spread_ms


@dataclass(frozen=True, slots=True)
class MeasuredChoice:
    """``plans``, that which is ``taken`` first, then those that ran longest, and of these the fastest.

    ``why`` says in a sentence why it was taken. ``failed`` are plans that could not be run, with the reason.
    """

    plans: tuple[MeasuredPlan, ...]
    why: str
    failed: tuple[tuple[Candidate, str], ...]
    runs: int
    elapsed_s: float

    @property
    def taken(self) -> MeasuredPlan:
        """The plan to write."""
        return self.plans[0]

    @property
    def gain_is_unclear(self) -> bool:
        """Whether what is taken differs from a plan that was kept by no more than runs differ among themselves."""
        return not self.taken.kept and any(
            each.kept and self.taken.measured.like(each.measured) for each in self.plans
        )


def choose(
    contenders: Contenders, run: Run, step_ms: float, progress: Progress = lambda done, of, best: None
) -> MeasuredChoice:
    """Run plans in rounds (``halving``) until one is left, and take it if it is faster than all that were kept.

    ``step_ms`` is about how long a step takes. Raises UserError where a plan that is kept cannot be run: there would be
    nothing to compare with.
    """
    begun = time.perf_counter()
    every, kept = contenders.all, range(len(contenders.kept))
    of, done = most_runs(len(every), len(kept)), 0
    failed: list[tuple[Candidate, str]] = []

    def ran(number: int, steps: int) -> Sequence[float]:
        try:
            return run(every[number], steps)
        except UserError as failure:
            if number in kept:
                raise
            failed.append((every[number], str(failure)))
            return ()

    def after(so_far: Sequence[Runs]) -> None:
        nonlocal done
        done += 1
        if so_far[-1]:
            progress(done, of, _best_so_far(every, so_far))

    so_far = run_rounds(len(every), kept, ran, step_ms, after)
    if not so_far[-1]:
        raise UserError("no plan could be run", got=failed[0][1], fix="Leave out --measure.")
    out = {id(candidate) for candidate, _ in failed}
    found = [
        MeasuredPlan(each, measured(so_far, number), sum(number in runs for runs in so_far), number in kept)
        for number, each in enumerate(every)
        if id(each) not in out
    ]
    first = every[winner(so_far, kept)]
    found.sort(key=lambda each: (each.candidate is not first, -each.rounds, each.measured.step_ms))
    return MeasuredChoice(tuple(found), _why(found), tuple(failed), done, time.perf_counter() - begun)


def _best_so_far(every: Sequence[Candidate], so_far: Sequence[Runs]) -> str:
    """The fastest of those that have run in the round that is on."""
    times_ms = {number: measured(so_far, number).step_ms for number in so_far[-1]}
    best = min(times_ms, key=times_ms.__getitem__)
    return f"{every[best].name}, {times_ms[best]:.1f} ms"


def _why(found: Sequence[MeasuredPlan]) -> str:
    taken, others = found[0], found[1:]
    left_with = min(
        (each for each in others if each.kept), key=lambda each: each.measured.step_ms, default=None
    )
    if taken.kept:
        rival = min(
            (each for each in others if not each.kept), key=lambda each: each.measured.step_ms, default=None
        )
        if rival is None:
            return "No other plan could be run"
        return f"No other plan was faster as measured: {_said(rival)}"
    if left_with is None:
        return "It was the fastest as measured"
    gain = left_with.measured.step_ms / taken.measured.step_ms
    said = f"It was {gain:.2f} times as fast as {_said(left_with)}"
    unclear = taken.measured.like(left_with.measured)
    return said + ", which is no more than runs differ among themselves" * unclear


def _said(plan: MeasuredPlan) -> str:
    return f"{plan.candidate.name} ({plan.measured.step_ms:.1f} ± {plan.measured.spread_ms:.1f} ms)"
