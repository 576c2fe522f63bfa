"""A job under asynchronous parameter servers for some time, as replay and predictions simulate it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from headway.graph.build import GraphBuilder, RankCursor
from headway.graph.computation import Part
from headway.job import Job
from headway.simulation.engine import play
from headway.strategies.horizon import Outcome
from headway_baselines.asynchronous_servers.schedule import ShardSchedule
from headway_baselines.steps_alone import steps_alone_ns

LEAST, COUNTED = 10, 40  # iterations of a rank that takes the mean time
MOST_EXCHANGES = 400_000
PUSHES, PULLS = 0, 1  # connections: a worker's to a server, and back


@dataclass(slots=True)
class _Laid:
    """The operations of a job that is laid out, by rank, and by (worker, server) their updates of each iteration."""

    graph: GraphBuilder[ShardSchedule]
    computed: list[list[int]]
    resumed: list[list[int]]
    updated: dict[tuple[int, int], list[int]] = field(default_factory=dict)


def over_a_horizon(job: Job, schedule: ShardSchedule) -> Outcome:
    """Simulate ``job`` until the first rank has made its iterations: some 40 of a mean rank, a fifth of them a warm-up.

    A rank computes, pushes its gradients to all servers concurrently, each updates its share, which takes that share
    of what the optimizer takes, and answers with its parameters; with a bound not before the slowest worker has come
    near enough. Iterations are laid out as often as ranks make them: first by what they compute, then by what they
    reached. Updates of one shard at the same time do not queue up, and neither they nor messages slow computation down.
    """
    steps_ns = steps_alone_ns(job, without=(Part.OPTIMIZER,))
    exchanges = max(1, job.world_size * (job.world_size - 1))
    counted = max(LEAST, min(COUNTED, MOST_EXCHANGES // exchanges))
    rates = [len(own) / sum(own) for own in steps_ns]
    outcome = _played(job, schedule, steps_ns, _counts(rates, counted))
    if job.world_size > 1:
        outcome = _played(job, schedule, steps_ns, _counts(outcome.iterations_per_s, counted))
    return outcome


def _counts(rates: Sequence[float], counted: int) -> list[int]:
    """How many iterations each rank is to make, the mean rank about ``counted``."""
    mean = sum(rates) / len(rates)
    return [max(3, round(counted * rate / mean)) for rate in rates]


def _played(
    job: Job, schedule: ShardSchedule, steps_ns: Sequence[Sequence[int]], counts: Sequence[int]
) -> Outcome:
    if schedule.staleness is not None:  # nobody can be further ahead
        counts = [min(each, min(counts) + schedule.staleness) for each in counts]
    laid = _laid_out(job, schedule, steps_ns, counts)
    operations = laid.graph.close()
    played = play(operations)
    end_ns = played.end_ns.tolist()
    computed_ns = [[end_ns[each] for each in own] for own in laid.computed]
    resumed_ns = [[end_ns[each] for each in own] for own in laid.resumed]
    until_ns = min(own[-1] for own in resumed_ns)
    from_ns = until_ns // 5
    standing_ns = [
        sum(
            after - max(before, from_ns)
            for before, after in zip(mine, theirs, strict=True)
            if from_ns < after <= until_ns
        )
        for mine, theirs in zip(computed_ns, resumed_ns, strict=True)
    ]
    updated_ns = {pair: [end_ns[each] for each in own] for pair, own in laid.updated.items()}
    return Outcome(
        from_ns=from_ns, until_ns=until_ns, finished_ns=resumed_ns, groups=(), standing_ns=standing_ns,
        forming_ns=[0] * job.world_size, distance=0.0, spread=0.0, mean_spread=0.0, operations=len(operations),
        staleness=staleness_of(updated_ns, from_ns, until_ns),
    )  # fmt: skip


def _laid_out(
    job: Job, schedule: ShardSchedule, steps_ns: Sequence[Sequence[int]], counts: Sequence[int]
) -> _Laid:
    ranks = range(job.world_size)
    graph = GraphBuilder(job.on, schedule)
    laid = _Laid(graph, [[] for _ in ranks], [[] for _ in ranks])
    whole_bytes = max(1, sum(schedule.sizes_bytes))
    optimizer_ns = [_optimizer_ns(job, rank) for rank in ranks]
    cursors = [RankCursor(rank) for rank in ranks]
    serving = {
        (worker, server): RankCursor(server) for worker in ranks for server in ranks if worker != server
    }
    laid.updated = {(worker, server): [] for worker in ranks for server in ranks}
    # Iteration by iteration of all, so that what a bound waits for is laid out before who waits.
    for iteration in range(max(counts)):
        there = [rank for rank in ranks if iteration < counts[rank]]
        pulls = []
        for worker in there:
            cursor, own_ns = cursors[worker], steps_ns[worker]
            cursor.step = iteration
            graph.compute(cursor, Part.REST, own_ns[iteration % len(own_ns)])
            laid.computed[worker].append(cursor.tail)
            for server in ranks:
                update_ns = round(optimizer_ns[server] * schedule.sizes_bytes[server] / whole_bytes)
                after = [cursor.tail]
                if worker != server:
                    at = serving[worker, server]
                    number = graph.transfer(
                        cursor, worker, server, iteration, schedule.sizes_bytes[server], name="push",
                        channel=PUSHES,
                    )  # fmt: skip
                    graph.transfer(
                        at, worker, server, iteration, schedule.sizes_bytes[server], name="push",
                        channel=PUSHES,
                    )  # fmt: skip
                    after = [graph.communications[number].end_of(server)]
                update = graph.operations.operation(update_ns, after=after)
                laid.updated[worker, server].append(update)
        for worker in there:
            for server in ranks:
                answers = graph.operations.operation(
                    after=_answered_after(laid.updated, schedule, counts, worker, server, iteration)
                )
                if worker == server:
                    pulls.append((worker, answers))
                    continue
                at = serving[worker, server]
                at.tail = answers
                number = graph.transfer(
                    at, server, worker, iteration, schedule.sizes_bytes[server], name="pull", channel=PULLS
                )
                graph.transfer(
                    cursors[worker], server, worker, iteration, schedule.sizes_bytes[server], name="pull",
                    channel=PULLS,
                )  # fmt: skip
                pulls.append((worker, graph.communications[number].end_of(worker)))
        for worker in there:
            resumed = graph.operations.operation(after=[each for own, each in pulls if own == worker])
            cursors[worker].tail = resumed
            laid.resumed[worker].append(resumed)
    return laid


def _answered_after(
    updated: Mapping[tuple[int, int], Sequence[int]], schedule: ShardSchedule, counts: Sequence[int],
    worker: int, server: int, iteration: int,
) -> list[int]:  # fmt: skip
    """What a server answers an iteration's push after: its update, and with a bound the slowest workers'."""
    after = [updated[worker, server][iteration]]
    if schedule.staleness is not None and (least := iteration - schedule.staleness) >= 0:
        others = (other for other in range(schedule.world_size) if other != worker)
        after += [updated[other, server][least] for other in others if least < counts[other]]
    return after


def _optimizer_ns(job: Job, rank: int) -> int:
    timelines = job.steps.timelines
    own = timelines.get(rank) or timelines[sorted(timelines)[rank % len(timelines)]]
    return round(job.steps.factor_of(rank) * sum(each.optimizer_ns for each in own) / len(own))


def staleness_of(
    updated_ns: Mapping[tuple[int, int], Sequence[int]], from_ns: int, until_ns: int
) -> tuple[float, int]:
    """How many updates by others lie between two of one worker's, in the mean over all of them and at most.

    ``updated_ns[worker, server]`` are the times of the updates of ``server`` by ``worker``.
    """
    total = most = pushes = 0
    for server in {server for _, server in updated_ns}:
        of_worker = {worker: own for (worker, at), own in updated_ns.items() if at == server}
        everyones = sorted(time_ns for own in of_worker.values() for time_ns in own)
        for own in of_worker.values():
            for before, after in pairwise(own):
                if from_ns < after <= until_ns:
                    between = bisect_left(everyones, after) - bisect_left(everyones, before) - 1
                    total, most, pushes = total + max(0, between), max(most, between), pushes + 1
    return (total / pushes if pushes else 0.0), most
