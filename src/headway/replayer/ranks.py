"""The steps that every rank of a replay takes: its own if it was recorded, otherwise those of recorded ranks.

Ranks that were not recorded repeat the recorded ones, but start at another step: if all were in the same step at a
time, the slowest of many ranks would never be slower than the slowest of the recorded ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from headway.graph.timeline import Item, Part, Point, Timeline
from headway.incidents import Incidents
from headway.job import Job
from headway.replayer.folding import period_of
from headway.replayer.size import operations_of
from headway.scheduling.schedule import Schedule
from headway.strategies.base import Strategy
from headway.strategies.slowing import slowed
from headway.trace.events import Read

MOST_OPERATIONS = 10_000_000  # that are worth playing for more different ranks
LAUNCHING = (Point.READY, Point.UNUSED, Point.BACKWARD_END, Point.BLOCKING, Point.STEP)

Recorded = Mapping[int, Sequence[Timeline]]


def draws_of(job: Job, strategy: Strategy, schedule: Schedule) -> int:
    """How often the recorded ranks are drawn, each time from another step on, before they repeat.

    As often as the workers of ``job`` need and as there are steps, where so many ranks can be played in good time.
    """
    recorded, cluster = job.steps.timelines, job.on
    rounds = -(-cluster.world_size // len(recorded))
    steps = len(recorded[min(recorded)])
    if rounds == 1 or steps == 1 or not _alike(recorded):
        return 1
    a_rank = operations_of([recorded[min(recorded)]], job, strategy, schedule)
    for draws in range(min(rounds, steps), 1, -1):
        if a_rank * period_of(cluster, draws * len(recorded)) <= MOST_OPERATIONS:
            return draws
    return 1


def ranks_of(
    recorded: Recorded,
    draws: int,
    factors: Iterable[float],
    warm_up_steps: int = 1,
    incidents: Incidents = Incidents(),  # noqa: B008
) -> list[list[Timeline]]:
    """One list of timelines per rank, whose computation takes ``factors`` times as long.

    Some of the steps are slow by chance, by ``incidents``. The first of them is repeated ``warm_up_steps`` times.
    """
    names = sorted(recorded)
    ranks = []
    for rank, factor in enumerate(factors):
        timelines = recorded.get(rank) or recorded[names[rank % len(names)]]
        first = 0 if rank in recorded else rank // len(names) % draws
        own = [*timelines[first:], *timelines[:first]]
        if factor != 1.0:
            own = [timeline.scaled(factor) for timeline in own]
        if incidents.slow_share:
            share, slow = incidents.slow_share, incidents.slow_factor
            own = [each.scaled(slowed(share, slow, 0, rank, step)) for step, each in enumerate(own)]
        ranks.append([own[0]] * warm_up_steps + own)
    return ranks


def may_fold(recorded: Recorded) -> bool:
    """Whether rank ``r`` takes the steps of rank ``r`` modulo the number of recorded ranks."""
    if any(item.members for own in recorded.values() for timeline in own for item in timeline.items):
        return False
    return len(recorded) == 1 or sorted(recorded) == list(range(len(recorded)))


def _launches(item: Item) -> bool:
    """Whether something may be communicated at it: to read gradients may take gathers."""
    return item.kind in LAUNCHING or (item.kind == Part.READ and item.name != Read.VALUES)


def _alike(recorded: Recorded) -> bool:
    """Whether all steps launch the same, so that ranks may be in different ones at a time."""
    launches = {
        tuple(sorted((item.kind, item.name, item.size_bytes) for item in timeline.items if _launches(item)))
        for timelines in recorded.values()
        for timeline in timelines
    }
    return len(launches) == 1
