"""A job under local SGD for some periods, as replay and predictions simulate it: ranks meet at the end of each."""

from __future__ import annotations

from itertools import accumulate

from headway.collectives.algorithms import ALL_REDUCE
from headway.errors import UserError
from headway.graph.build import GraphBuilder, RankCursor
from headway.graph.computation import Part
from headway.job import Job
from headway.simulation.engine import play
from headway.strategies.horizon import GroupRun, Outcome
from headway_baselines.local_sgd.footprint import averaged_bytes
from headway_baselines.local_sgd.schedule import PeriodicSchedule
from headway_baselines.steps_alone import steps_alone_ns

COUNTED = 40  # iterations at least, and two periods
MOST_RANK_ITERATIONS = 5_000_000


def over_a_horizon(job: Job, schedule: PeriodicSchedule) -> Outcome:
    """Simulate ``job`` for a period of warm-up and at least two more, of ``schedule.steps`` iterations of a rank each.

    Between two averages a rank waits for nobody, so that a straggler costs the others what it is late by at the end of
    a period, and not in each step. Ranks that were not recorded take the steps of those that were. To copy tensors and
    to take the outer step is no part of it. Raises UserError where it would be too large.
    """
    steps_ns = steps_alone_ns(job)
    counted = max(2, -(-max(COUNTED, *map(len, steps_ns)) // schedule.steps))
    periods = 1 + counted
    if (rank_iterations := periods * schedule.steps * job.world_size) > MOST_RANK_ITERATIONS:
        raise UserError(
            "the simulation would be too large", got=f"{rank_iterations:.1e} iterations of ranks",
            expected=f"at most {MOST_RANK_ITERATIONS:.0e}", fix="Replay fewer workers, or shorter periods.",
        )  # fmt: skip
    graph = GraphBuilder(job.on, schedule)
    size_bytes = averaged_bytes(job.model, schedule)
    selection = graph.selection_of(ALL_REDUCE, size_bytes)
    cursors = [RankCursor(rank) for rank in range(job.world_size)]
    computed: list[list[int]] = [[] for _ in cursors]  # an operation for each period of a rank
    for period in range(periods):
        for cursor, own_ns in zip(cursors, steps_ns, strict=True):
            cursor.step = period
            whole_ns = sum(own_ns[at % len(own_ns)] for at in _iterations(schedule, period))
            graph.compute(cursor, Part.REST, whole_ns)
            computed[cursor.rank].append(cursor.tail)
            if job.world_size > 1:
                number = graph.launch(cursor, ALL_REDUCE, 0, size_bytes, bucket=-1, selection=selection)
                graph.wait(cursor, "average", number)
    for cursor in cursors:
        graph.compute(cursor, Part.REST, 0)  # the last average is waited for
    operations = graph.close()
    played = play(operations)
    start_ns, end_ns = played.start_ns.tolist(), played.end_ns.tolist()

    finished: list[list[int]] = [[] for _ in cursors]
    for rank, own_ns in enumerate(steps_ns):
        for period, operation in enumerate(computed[rank]):
            each_ns = (own_ns[at % len(own_ns)] for at in _iterations(schedule, period))
            finished[rank] += [start_ns[operation] + since_ns for since_ns in accumulate(each_ns)]
    runs, standing_ns, forming_ns = [], [0] * len(cursors), [0] * len(cursors)
    for period, collective in enumerate(graph.collectives):
        came_ns = [end_ns[begin] for begin in collective.begins]
        left_ns = [end_ns[end] for end in collective.ends]
        made = (schedule.steps * (period + 1),) * len(cursors)
        runs.append(
            GroupRun(period, tuple(range(len(cursors))), made, max(came_ns), max(left_ns), averaged=True)
        )
        for rank in range(len(cursors)) if period else ():
            standing_ns[rank] += left_ns[rank] - came_ns[rank]
            forming_ns[rank] += max(came_ns) - came_ns[rank]
    ends_ns = [max(end_ns[own[period]] for own in computed) for period in (0, periods - 1)]
    if runs:
        ends_ns = [runs[0].end_ns, runs[-1].end_ns]
    return Outcome(
        from_ns=ends_ns[0],
        until_ns=ends_ns[1],
        finished_ns=finished,
        groups=runs,
        standing_ns=standing_ns,
        forming_ns=forming_ns,
        distance=0.0,
        spread=0.0,
        mean_spread=mean_spread(schedule),
        operations=len(operations),
        cost_error=selection.cost(graph.cluster).fit_error if runs else 0.0,
    )


def mean_spread(schedule: PeriodicSchedule) -> float:
    """How far models are from their mean when a gradient is computed, in the mean over a period.

    As ``coordination.matrices.Consensus`` has it: k steps after an average each model has moved by a variance of k, and
    the mean of n models by k / n.
    """
    apart = 1 - 1 / schedule.world_size
    return float(sum((since * apart) ** 0.5 for since in range(schedule.steps)) / schedule.steps)


def _iterations(schedule: PeriodicSchedule, period: int) -> range:
    return range(period * schedule.steps, (period + 1) * schedule.steps)
