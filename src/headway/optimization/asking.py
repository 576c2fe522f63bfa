"""What a search asks of replay: one plan after the other, with what is known of each before it is replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from headway.job import Job
from headway.optimization.candidate import UNCHANGED, Candidate
from headway.optimization.replaying import Asked
from headway.optimization.sizes import Size
from headway.planning.bound import OwnBounds
from headway.plugins import asking
from headway.replayer.expectation import Expectation
from headway.replayer.memory import peak_bytes, peak_is_rough
from headway.replayer.replayer import Replayer
from headway.scheduling.buckets import BucketSchedule
from headway.scheduling.schedule import Schedule
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.plugin import Proposal
from headway.strategies.registry import plugin_of


@dataclass(frozen=True)
class Asking:
    """A search of ``replayer`` under whose ``recorded`` strategy ``in_force`` was; ``bounds`` are known by strategy."""

    replayer: Replayer
    recorded: Strategy
    in_force: Schedule
    bounds: Mapping[str, OwnBounds]

    def asked(self, played_by: Replayer | Size, said: str, strategy: Strategy, schedule: Schedule) -> Asked:
        """A plan to be replayed. The recorded one, and stock DDP, always are."""
        lower_ms = partial(self._lower_ms, strategy, schedule) if played_by is self.replayer else _unknown
        always = schedule == self.in_force or strategy == DistributedDataParallelStrategy()
        replay = partial(self._replayed, played_by, said, strategy, schedule)
        return Asked(strategy, schedule, replay, lower_ms, always=always)

    def _replayed(
        self, played_by: Replayer | Size, said: str, strategy: Strategy, schedule: Schedule
    ) -> Candidate:
        with asking("strategy", strategy):
            expected, held_bytes, is_rough = _played(played_by, strategy, schedule)
            changes = _changes(self.recorded, self.in_force, strategy, schedule)
            name = strategy.describe() + (f" ({said})" if said else "")
        other = isinstance(played_by, Size)
        return Candidate(
            name,
            strategy,
            schedule,
            expected,
            changes,
            held_bytes,
            of_other_size=other,
            peak_is_rough=is_rough,
        )

    def _lower_ms(self, strategy: Strategy, schedule: Schedule) -> float:
        """What is predicted of a plan at least. Where replay is too slow for the record, so may its bound be."""
        known = self.bounds.get(strategy.name)
        if known is None or not isinstance(schedule, BucketSchedule):
            return 0.0
        with asking("strategy", strategy):
            if plugin_of(strategy).as_run(strategy, self.replayer.job) != strategy:
                return 0.0
        return known.of(schedule).step_ms * min(
            1.0, self.replayer.recorded_step_ms / self.replayer.base.step_ms
        )


def _unknown() -> float:
    return 0.0


def bounded(proposals: Sequence[Proposal], job: Job) -> dict[str, OwnBounds]:
    """Bounds of plans of those strategies that have one, by name."""
    if len(job.stages) > 1:
        return {}
    bounds = OwnBounds(job)
    return {each.name: bounds for made in proposals if made.bound for each in made.strategies}


def _played(
    played_by: Replayer | Size, strategy: Strategy, schedule: Schedule
) -> tuple[Expectation, int | None, bool]:
    """What to expect of a plan, and what a rank holds and whether that is rough; of ranks that come as they will, over
    a time."""
    if isinstance(played_by, Replayer) and (outcome := played_by.replay_horizon(strategy)) is not None:
        job = played_by.job
        held_bytes = peak_bytes(job, strategy, schedule) if job.has_parameters else None
        return played_by.expect_outcome(outcome), held_bytes, peak_is_rough(job, strategy, schedule)
    played = played_by.replay(strategy)
    return played_by.expect(played), played.peak_bytes, played.peak_is_rough


def _changes(before: Strategy, had: Schedule, after: Strategy, has: Schedule) -> tuple[str, ...]:
    changes = []
    if before.name != after.name:
        changes.append(f"{after.name} instead of {before.name}")
    if had.parts != has.parts:
        same_kind = isinstance(has, type(had))
        changes.append(f"{has.parts} instead of {had.collectives if same_kind else had.parts}")
    changes += plugin_of(after).explain(before, after)
    if not changes and had != has:
        changes.append("as many collectives, of other contents or in another order")
    return tuple(changes) or UNCHANGED
