"""How large a replay would be: it is refused before anything is built if it is too large or times are out of range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from headway.errors import UserError
from headway.graph.timeline import Part, Point, Timeline
from headway.job import Job
from headway.scheduling.pipeline.replicated import ReplicatedSchedule
from headway.scheduling.schedule import Schedule
from headway.strategies.base import Strategy
from headway.strategies.registry import plugin_of

MAX_OPERATIONS = 60_000_000
BYTES_AN_OPERATION = 80  # its line, and when it started and ended


def check_size(ranks: Sequence[Sequence[Timeline]], job: Job, strategy: Strategy, schedule: Schedule) -> None:
    """Refuse what would take too long."""
    operations = operations_of(ranks, job, strategy, schedule)
    if operations > MAX_OPERATIONS:
        raise UserError(
            "the replay would be too large",
            got=f"about {operations:.1e} operations, {operations * BYTES_AN_OPERATION / 1e9:.0f} GB",
            expected=f"at most {MAX_OPERATIONS:.0e}, {MAX_OPERATIONS * BYTES_AN_OPERATION / 1e9:.0f} GB",
            fix="Replay fewer workers, or record fewer steps.",
        )


def operations_of(
    ranks: Sequence[Sequence[Timeline]], job: Job, strategy: Strategy, schedule: Schedule
) -> int:
    """Roughly how many operations there are: those of each pass's buckets, and of blocking collectives."""
    world_size = job.world_size
    items = collectives = 0
    pieces = plugin_of(strategy).messages(schedule, world_size, job.on.library)
    for timelines in ranks:
        launched = 0
        for item in (item for timeline in timelines for item in timeline.items):
            items += 1
            launched += pieces * (item.kind == Point.BACKWARD_END) + (
                item.kind in (Point.BLOCKING, Part.READ)
            )
        collectives = max(collectives, launched)
    steps = 4 * world_size + 4
    if isinstance(schedule, ReplicatedSchedule):  # NCCL's own model times what its replicas do as a whole
        steps = 3 if job.on.nccl is not None else 4 * len(schedule.pipelines) + 4
    return items + collectives * len(ranks) * steps


@contextmanager
def times_in_range() -> Iterator[None]:
    """Say in words that times are more than replay can count."""
    try:
        yield
    except OverflowError:
        raise UserError(
            "the replayed times are out of range",
            expected="steps of less than a century",
            fix="Check the rates and latencies of the cluster, and --what-if.",
        ) from None
