"""The choice among plans that short runs have measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.errors import UserError
from headway.optimization.candidate import Candidate
from headway.optimization.measured.contenders import Contenders
from headway.optimization.measured.halving import (
    Compared,
    Measured,
    Runs,
    compared,
    measured,
    most_runs,
    reference_of,
    run_rounds,
    winner,
)

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
        return next((each for each in self.plans if each.is_reference), None)

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
        rival = next((each for each in self.plans if each is not self.taken), None)
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
