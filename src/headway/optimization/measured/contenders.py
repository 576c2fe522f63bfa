"""Which plans are measured: the best that a command can follow, and those it would be left with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headway.optimization.candidate import Candidate
from headway.optimization.result import SearchResult, names_of
from headway.strategies.base import Strategy
from headway.strategies.data_parallel.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.pipeline.policy import RECORDED, PipelineStrategy
from headway.strategies.registry import plugin_of

MOST = 4
"""So many plans are measured at most where predictions do not tell them apart."""


@dataclass(frozen=True, slots=True)
class Contenders:
    """``kept``, the recorded plan and stock DDP, are measured in every round; ``plans`` have to beat them.

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

    Of each kind (a strategy, what it gathers, with passes or without) the best comes first, so that not all are
    variants of one. With ``strategy`` they are of the strategy of that name alone.
    """
    kept = _left_with(found)
    like = (best, *found.like(best))
    if count is None and (len(like) == 1 and not (best.changed and best.expected.may_gain_nothing)):
        return Contenders()
    among = found.candidates if count is not None else like
    able = [
        each
        for each in among
        if each not in kept and is_measurable(each) and strategy in (None, *names_of(each.strategy))
    ]
    plans = tuple(_varied(able))[: MOST if count is None else count]
    return Contenders(kept, plans) if plans else Contenders()


def is_measurable(candidate: Candidate) -> bool:
    """Whether an unmodified command can follow it for a while, and ranks finish its steps together."""
    plugin = plugin_of(candidate.strategy)
    followable = plugin.injection is not None or plugin.schedule_injection is not None
    return candidate.recut is None and followable and not plugin.has_horizon and runs_by_plan(candidate)


def runs_by_plan(candidate: Candidate) -> bool:
    """Whether a plan says how to run it; of an order that was only recorded, the command alone does."""
    strategy: Strategy = candidate.strategy
    pipeline = strategy.pipeline if isinstance(strategy, MeshStrategy) else strategy
    return not (isinstance(pipeline, PipelineStrategy) and pipeline.order == RECORDED)


def _left_with(found: SearchResult) -> tuple[Candidate, ...]:
    """The recorded plan, and stock DDP where that is another one."""
    stock = DistributedDataParallelStrategy()
    recorded = [each for each in found.candidates if not each.changed and each.recut is None]
    plain = [each for each in found.candidates if each.strategy == stock and not each.passes]
    return tuple(dict.fromkeys((*recorded[:1], *plain[:1])))


def _varied(ranked: list[Candidate]) -> Iterator[Candidate]:
    first = {_kind(each): each for each in reversed(ranked)}
    leading = [each for each in ranked if first[_kind(each)] is each]
    yield from leading
    yield from (each for each in ranked if each not in leading)


def _kind(candidate: Candidate) -> tuple[str, str, bool]:
    return candidate.strategy.name, getattr(candidate.schedule, "gather", ""), bool(candidate.passes)
