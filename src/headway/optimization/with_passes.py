"""Passes on top of strategies: each that is proposed is tried, and kept where plans become faster, or small enough."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from headway.errors import UserError
from headway.job import Job
from headway.optimization.candidate import UNCHANGED, Candidate, fits_within
from headway.passes.base import Pass, rewritten
from headway.passes.registry import passes
from headway.permission import permitted
from headway.planning.bound import Form, StepBound, bound_of
from headway.plugins import PluginFaultError, answers, asking, leave_out
from headway.replayer.replayer import Replayer
from headway.strategies.registry import plugin_of
from headway.time_limit import time_is_up

LEAST_GAIN = 0.01  # of a step, for which a pass is worth it
MOST_PLANS = 3
"""So many of the fastest plans are tried with passes, and the fastest of each other strategy: users may want that."""
FORMS: tuple[Form, ...] = ("all-reduce", "gradients", "parameters")


@dataclass(frozen=True, slots=True)
class WithPasses:
    """Plans with passes, and the bounds of jobs under them; ``replays`` is how many were tried."""

    found: tuple[Candidate, ...] = ()
    bounds: tuple[StepBound, ...] = ()
    replays: int = 0


def with_passes(
    replayer: Replayer, candidates: Sequence[Candidate], limit_bytes: int | None, allow: Collection[str]
) -> WithPasses:
    """The fastest of ``candidates`` with those passes that make them faster, or fit into ``limit_bytes``.

    Passes are added one by one, that which gains most first. Those that only save memory are tried where a plan needs
    more than the limit. ``candidates`` are of the recorded job as it is. Passes that change what is trained need a
    permission.
    """
    job = replayer.job
    if len(job.stages) > 1:
        return WithPasses()
    kinds = dict(answers("pass", passes().items(), lambda kind: _proposed(kind, job, allow)))
    kinds = {name: found for name, found in kinds.items() if found}
    able = [
        candidate
        for candidate in candidates
        if candidate.recut is None and not plugin_of(candidate.strategy).has_horizon
    ]
    if not kinds or not able:
        return WithPasses()
    tried = _Tried(replayer, kinds, limit_bytes)
    found = [grown for base in _bases(able) if (grown := tried.grown(base)) is not base and tried.fits(grown)]
    bounds = [_bound(job, each.passes) for each in found]
    return WithPasses(tuple(found), tuple(bounds), tried.replays)


def _bases(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Which candidates passes are added to."""
    in_order = sorted(candidates, key=lambda each: each.predicted_ms)
    fastest: dict[str, Candidate] = {}
    for each in in_order:
        fastest.setdefault(each.strategy.name, each)
    first = in_order[:MOST_PLANS]
    return first + [each for each in fastest.values() if each not in first]


def _proposed(kind: type[Pass], job: Job, allow: Collection[str]) -> tuple[Pass, ...]:
    return tuple(each for each in kind.proposed(job) if permitted({each.permission} - {""}, allow))


def _bound(job: Job, applied: Sequence[Pass]) -> StepBound:
    """What no plan under these passes can beat, in whatever form."""
    job = rewritten(job, applied)
    return min((bound_of(job, form) for form in FORMS), key=lambda each: each.step_ns)


class _Tried:
    """Tries passes on plans, one replay each."""

    def __init__(
        self, replayer: Replayer, kinds: dict[str, tuple[Pass, ...]], limit_bytes: int | None
    ) -> None:
        self._replayer, self._kinds, self._limit_bytes = replayer, kinds, limit_bytes
        self.replays = 0

    def fits(self, candidate: Candidate) -> bool:
        """Whether no rank needs more than the limit."""
        return fits_within(candidate, self._limit_bytes)

    def grown(self, base: Candidate) -> Candidate:
        """``base`` with the passes that are worth it, or itself."""
        current, left = base, dict(self._kinds)
        while left:
            options = [
                made
                for kind in left.values()
                for each in kind
                if not (each.saves_memory_alone and self.fits(current))
                if (made := self._with(current, each)) is not None
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
        """The candidate with one more pass; None where that cannot be replayed, or time is up."""
        applied = tuple(sorted((*candidate.passes, added), key=lambda each: not each.stands_first))
        if any(each.stands_first for each in applied[1:]):  # what two do together was not measured
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
