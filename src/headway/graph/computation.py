"""What the ranks of a job compute: timelines of the ranks that are known, and by how much others differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import cycle, islice

from headway.errors import UserError
from headway.graph.timeline import Timeline

RankTimelines = Mapping[int, tuple[Timeline, ...]]


@dataclass(frozen=True, eq=False)
class Computation:
    """The steps that ranks compute, without any communication.

    ``timelines[rank][position]`` are the steps of the ranks that are known; the others do what these do. ``factor``
    multiplies the time that computation takes, ``rank_factors`` that of single ranks besides. The first step is played
    ``warm_up_steps`` times before those that count, so that what a strategy carries over from step to step is in
    flight. ``with_factors`` gives the timelines again where what has a name that a pattern matches takes so many times
    as long; it is None where names are not known.
    """

    timelines: RankTimelines
    warm_up_steps: int = 1
    factor: float = 1.0
    rank_factors: Mapping[int, float] = field(default_factory=dict)
    with_factors: Callable[[Mapping[str, float]], RankTimelines] | None = None

    def scaled(self, factor: float, rank_factors: Mapping[int, float]) -> Computation:
        """The same with computation taking ``factor`` times as long, on single ranks ``rank_factors`` times that."""
        ranks = {
            rank: self.rank_factors.get(rank, 1.0) * rank_factors.get(rank, 1.0)
            for rank in {*self.rank_factors, *rank_factors}
        }
        return replace(self, factor=self.factor * factor, rank_factors=ranks)

    def kernels_scaled(self, factors: Mapping[str, float]) -> Computation:
        """The same with what a pattern of ``factors`` matches by name taking so many times as long.

        Raises UserError where nothing has names, TraceError for a pattern that nothing matches.
        """
        if self.with_factors is None:
            raise UserError(
                "times of single kernels are known only from a recording", got=", ".join(factors),
                expected="a recording", fix="Record with headway record --detail operators.",
            )  # fmt: skip
        again = self.with_factors

        def with_both(more: Mapping[str, float]) -> RankTimelines:
            return again({**factors, **more})

        return replace(self, timelines=again(factors), with_factors=with_both)

    def in_periods_of(self, steps: int) -> Computation:
        """The same where ranks do something else in each of so many steps: steps repeat until there are whole periods.

        Whole periods are played before those that count, too.
        """
        if steps == 1:
            return self
        longest = max(map(len, self.timelines.values()))
        count = -(-longest // steps) * steps
        ranks = {rank: tuple(islice(cycle(own), count)) for rank, own in self.timelines.items()}
        return replace(self, timelines=ranks, warm_up_steps=-(-self.warm_up_steps // steps) * steps)

    @cached_property
    def has_groups(self) -> bool:
        """Whether ranks wait for collectives of some ranks only."""
        return any(item.members for own in self.timelines.values() for each in own for item in each.items)

    def factor_of(self, rank: int) -> float:
        """How many times as long computation takes on ``rank`` as its timelines say."""
        return self.factor * self.rank_factors.get(rank, 1.0)
