"""Which plans are measured: the best that a command can follow, and those it would be left with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    kept = tuple(each for each in dict.fromkeys((found.recorded, found.stock)) if each is not None)
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
