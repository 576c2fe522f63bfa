"""Adds passes to plans: each proposed pass is tried, and kept if it makes the plan faster or fit into memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from headway.bound import Form, StepBound, bound_of
from headway.errors import UserError
from headway.job import Job
from headway.optimization.candidate import UNCHANGED, Candidate, fits_within
from headway.passes.base import Pass, rewritten
from headway.passes.registry import passes
from headway.permission import permitted
from headway.plugins import PluginFaultError, answers, asking, leave_out
from headway.replayer.replayer import Replayer
from headway.strategies.registry import plugin_of
from headway.time_limit import time_is_up

LEAST_GAIN = 0.01  # share of a step that a pass has to save
MOST_PLANS = 3
"""Try passes on this many of the fastest plans, and on the fastest of every other strategy."""
FORMS: tuple[Form, ...] = ("all-reduce", "gradients", "parameters")


@dataclass(frozen=True, slots=True)
class WithPasses:
    """Plans with passes, and the lower bounds of their jobs; ``replays`` counts the plans tried."""

    candidates: tuple[Candidate, ...] = ()
    bounds: tuple[StepBound, ...] = ()
    replays: int = 0


def with_passes(
    replayer: Replayer, candidates: Sequence[Candidate], limit_bytes: int | None, allow: Collection[str]
) -> WithPasses:
    """Add passes to the fastest ``candidates`` where that makes them faster, or fit into ``limit_bytes``.

    Passes are added greedily, the largest gain first. Passes that only save memory are tried on plans over the limit.
    Passes that change training need a permission in ``allow``. ``candidates`` have the recorded job's size.
    """
    job = replayer.job
    if len(job.stages) > 1:
        return WithPasses()
    kinds = dict(answers("pass", passes().items(), lambda kind: _proposed(kind, job, allow)))
    kinds = {name: proposals for name, proposals in kinds.items() if proposals}
    able = [
        candidate
        for candidate in candidates
        if candidate.recut is None and not plugin_of(candidate.strategy).has_horizon
    ]
    if not kinds or not able:
        return WithPasses()
    tried = _Tried(replayer, kinds, limit_bytes)
    grown_plans = [
        grown for base in _bases(able) if (grown := tried.grown(base)) is not base and tried.fits(grown)
    ]
    bounds = [_bound(job, plan.passes) for plan in grown_plans]
    return WithPasses(tuple(grown_plans), tuple(bounds), tried.replays)


def _bases(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates to try passes on."""
    in_order = sorted(candidates, key=lambda candidate: candidate.predicted_ms)
    fastest: dict[str, Candidate] = {}
    for candidate in in_order:
        fastest.setdefault(candidate.strategy.name, candidate)
    first = in_order[:MOST_PLANS]
    return first + [candidate for candidate in fastest.values() if candidate not in first]


def _proposed(kind: type[Pass], job: Job, allow: Collection[str]) -> tuple[Pass, ...]:
    return tuple(pass_ for pass_ in kind.proposed(job) if permitted({pass_.permission} - {""}, allow))


def _bound(job: Job, applied: Sequence[Pass]) -> StepBound:
    """The lower bound for every plan with these passes, over all forms."""
    job = rewritten(job, applied)
    return min((bound_of(job, form) for form in FORMS), key=lambda bound: bound.step_ns)


class _Tried:
    """Tries passes on plans, with one replay for each combination."""

    def __init__(
        self, replayer: Replayer, kinds: dict[str, tuple[Pass, ...]], limit_bytes: int | None
    ) -> None:
        self._replayer, self._kinds, self._limit_bytes = replayer, kinds, limit_bytes
        self.replays = 0

    def fits(self, candidate: Candidate) -> bool:
        """Whether every rank fits into the memory limit."""
        return fits_within(candidate, self._limit_bytes)

    def grown(self, base: Candidate) -> Candidate:
        """``base`` with the passes that pay off, or ``base`` itself."""
        current, left = base, dict(self._kinds)
        while left:
            options = [
                grown
                for kind in left.values()
                for option in kind
                if not (option.saves_memory_alone and self.fits(current))
                if (grown := self._with(current, option)) is not None
            ]
            if not options:
                break
            best = min(options, key=self._rank)
            if not self._is_worth_it(current, best):
                break
            left.pop(next(pass_.name for pass_ in best.passes if pass_ not in current.passes))
            current = best
        return current

    def _rank(self, candidate: Candidate) -> tuple[bool, float]:
        fits = self.fits(candidate)
        return not fits, candidate.predicted_ms if fits else float(candidate.peak_bytes or 0)

    def _is_worth_it(self, before: Candidate, after: Candidate) -> bool:
        if self.fits(before):
            return self.fits(after) and after.predicted_ms < before.predicted_ms * (1 - LEAST_GAIN)
        return self.fits(after) or (after.peak_bytes or 0) < (before.peak_bytes or 0)

    def _with(self, candidate: Candidate, added: Pass) -> Candidate | None:
        """The candidate with one more pass, or None if it cannot be replayed or time is up."""
        applied = tuple(sorted((*candidate.passes, added), key=lambda pass_: not pass_.stands_first))
        if any(pass_.stands_first for pass_ in applied[1:]):  # their combination was never measured
            return None
        if (added.leaves_out_steps and candidate.strategy.counts_steps) or time_is_up():
            return None
        self.replays += 1
        try:
            with asking("pass", added):
                return self._replayed(candidate, added, applied)
        except PluginFaultError as fault:
            leave_out(fault)
            return None
        except UserError:
            return None

    def _replayed(self, candidate: Candidate, added: Pass, applied: tuple[Pass, ...]) -> Candidate:
        played = self._replayer.replay(candidate.strategy, passes=applied)
        changes = () if candidate.changes == UNCHANGED else candidate.changes
        return replace(
            candidate, name=f"{candidate.name} + {added.describe()}", expected=self._replayer.expect(played),
            changes=(*changes, added.describe()), peak_bytes=played.peak_bytes, passes=applied,
            peak_is_rough=played.peak_is_rough,
        )  # fmt: skip
