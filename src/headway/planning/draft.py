"""Drafts schedules as groups of parts, and predicts their cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headway.planning.early_gathers import gathers_after
from headway.planning.surrogate import BucketFacts, Played, Predictor
from headway.scheduling.buckets import BucketSchedule, GatherMode, Part, make_buckets
from headway.scheduling.fusion import coalesced


class Group(NamedTuple):
    """Parts that share a bucket."""

    parts: tuple[Part, ...]
    facts: BucketFacts


Groups = tuple[Group, ...]
CAUTION, CORE_CAUTION = 2e-5, 0.1
"""The penalty for each group on top of the prediction: shares of the step and of its collectives' overheads.

No model covers all costs of a job: overheads that hide behind messages still keep cores busy.
"""


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """The options of a schedule besides its groups; for ``early_gather_threshold`` see ``early_gathers``."""

    gather: GatherMode
    channels: int = 1
    early_gather_threshold: float | None = None


class ScheduleDrafter:
    """Predicts drafts and turns them into schedules. ``evaluated`` counts predictions."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.evaluated = 0
        halves = (predictor.cost.reduce_scatter.large, predictor.cost.all_gather.large)
        self._group_ns = CORE_CAUTION * sum(half.overhead_ns for half in halves)

    def group(self, parts: Iterable[Part]) -> Group:
        """The group of these parts."""
        merged = tuple(coalesced(parts))
        return Group(merged, self.predictor.facts(merged))

    def groups(self, parts: Iterable[Sequence[Part]]) -> Groups:
        """One group for each sequence of parts."""
        return tuple(self.group(part) for part in parts)

    def step_ns(self, groups: Sequence[Group], options: ScheduleOptions) -> float:
        """The predicted step in ns."""
        self.evaluated += 1
        return self._played(groups, options).step_ns

    def critical(self, groups: Sequence[Group], options: ScheduleOptions) -> list[int]:
        """Groups on the critical path, from its end to its beginning."""
        return self._played(groups, options).critical

    def _played(self, groups: Sequence[Group], options: ScheduleOptions) -> Played:
        facts = [group.facts for group in groups]
        order = _gather_order(facts)
        behind: list[list[int]] = [[] for _ in groups]
        if options.gather == "gradients":
            for bucket, after in zip(order, self._after(facts, order, options), strict=True):
                behind[after].append(bucket)
        return self.predictor.played(facts, order, behind, options.gather, options.channels)

    def cost_ns(self, groups: Sequence[Group], options: ScheduleOptions) -> float:
        """The predicted step plus a penalty for each group, in ns."""
        return self.step_ns(groups, options) * (1 + CAUTION * len(groups)) + self._group_ns * len(groups)

    def schedule(self, groups: Sequence[Group], options: ScheduleOptions) -> BucketSchedule:
        """The draft as a schedule."""
        facts = [group.facts for group in groups]
        order = _gather_order(facts)
        early = options.gather == "gradients" and options.early_gather_threshold is not None
        return BucketSchedule(
            buckets=make_buckets([group.parts for group in groups], self.predictor.model),
            gather_order=order,
            gather=options.gather,
            channels=options.channels,
            gathers_after=self._after(facts, order, options) if early else (),
            algorithms=self.predictor.algorithms,
        )

    def _after(
        self, facts: Sequence[BucketFacts], order: tuple[int, ...], options: ScheduleOptions
    ) -> tuple[int, ...]:
        if options.early_gather_threshold is None:
            return (len(facts) - 1,) * len(facts)
        return gathers_after(facts, order, self.predictor.cost, options.early_gather_threshold)


def _gather_order(facts: Sequence[BucketFacts]) -> tuple[int, ...]:
    return tuple(sorted(range(len(facts)), key=lambda index: (facts[index].need, index)))
