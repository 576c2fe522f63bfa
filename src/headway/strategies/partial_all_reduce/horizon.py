"""A job under partial all-reduce for some time, as replay and predictions simulate it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import TypeVar

from headway.cluster import Cluster, Host
from headway.collectives.algorithms import NCCL
from headway.errors import PlanError, UnsupportedError, UserError
from headway.graph.build import GraphBuilder, RankCursor
from headway.graph.computation import Computation, Part, Point, Timeline
from headway.graph.disturbance import play_disturbed
from headway.graph.step_layout import lay_out_ranks
from headway.incidents import Incidents
from headway.job import Job
from headway.scheduling.groups import GroupSchedule
from headway.simulation.engine import play
from headway.strategies.chance import slowed
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.ddp.reactions import Reactions
from headway.strategies.horizon import Outcome
from headway.strategies.partial_all_reduce.cosimulation import CoSimulation, Iterations, Scenario, parts_of
from headway.strategies.partial_all_reduce.plugin import averaged_bytes
from headway.strategies.partial_all_reduce.policy import PartialAllReduceStrategy

CHANCE_STEPS = 60  # that are simulated where some are slow by chance


@dataclass(frozen=True, slots=True)
class HostSteps:
    """Nanoseconds: of the steps of a host, one after the other and again, and of handing a model down to its ranks."""

    steps_ns: tuple[int, ...]
    hand_down_ns: int


def ddp_of(job: Job) -> DistributedDataParallelStrategy:
    """How the ranks of a host reduce gradients: in torch's default buckets, or as recorded if no more is known."""
    return DistributedDataParallelStrategy(bucket_cap_mb=None if job.has_parameters else 0)


def cluster_of_hosts(cluster: Cluster) -> Cluster:
    """The same hosts with a worker each: the first rank, whose messages alone go to other hosts."""
    hosts = [host.model_copy(update={"workers": 1}) for host in cluster.hosts]
    return _of(cluster, hosts, alone=False)


def steps_of_hosts(
    job: Job, workers: Sequence[Sequence[int]], timelines: Sequence[Sequence[Timeline]], size_bytes: int
) -> list[HostSteps]:
    """What the hosts of ``job`` take, whose ranks are ``workers``, for the steps ``timelines[rank]``.

    ``size_bytes`` are handed down. Raises PlanError where these are not the hosts of the job's cluster.
    """
    cluster = job.on
    if [len(ranks) for ranks in workers] != [host.workers for host in cluster.hosts]:
        raise PlanError(
            "the plan's hosts are not those of the cluster", got=", ".join(str(len(worker)) for worker in workers),
            expected=f"{', '.join(str(host.workers) for host in cluster.hosts)} ranks",
        )  # fmt: skip
    host_steps: list[HostSteps] = []
    cache: dict[tuple[object, ...], HostSteps] = {}  # hosts that are alike
    for host, ranks in zip(cluster.hosts, workers, strict=True):
        alone = _of(cluster, [host], alone=True)
        factors = tuple(job.steps.factor_of(rank) for rank in ranks)
        chance = tuple(ranks) if job.incidents.slow_share else ()
        key = (len(ranks), factors, chance, *(id(timelines[rank]) for rank in ranks))
        if key not in cache:
            steps = [
                _scaled(timelines[rank], job.steps.factor_of(rank), rank, job.incidents) for rank in ranks
            ]
            cache[key] = HostSteps(_steps_ns(job, alone, steps), hand_down_ns(alone, size_bytes))
        host_steps.append(cache[key])
    return host_steps


def hand_down_ns(host: Cluster, size_bytes: int) -> int:
    """How long the first rank of ``host`` takes to broadcast ``size_bytes`` to the others.

    Gloo does in a tree, in each level of which whoever has all of it sends it to one more. NCCL passes pieces on, which
    takes about one message.
    """
    ranks = host.world_size
    if ranks == 1:
        return 0
    if host.library == NCCL:
        host, ranks = _of(host, [host.hosts[0].model_copy(update={"workers": 2})], alone=True), 2
    graph = GraphBuilder(host, GroupSchedule(1, ((),)))
    cursors = [RankCursor(rank) for rank in range(ranks)]
    have = 1
    while have < ranks:
        for sender in range(min(have, ranks - have)):
            for rank in (sender, sender + have):
                number = graph.transfer(cursors[rank], sender, sender + have, 0, size_bytes)
                graph.wait(cursors[rank], "handed down", number)
        for cursor in cursors:
            graph.compute(cursor, Part.REST, 0)
        have *= 2
    operations = graph.close()
    return int(play(operations).end_ns.max())


def _of(cluster: Cluster, hosts: Sequence[Host], *, alone: bool) -> Cluster:
    """``cluster`` with other hosts; those that share cores have the same share of them. Alone, none has traffic."""
    workers = sum(host.workers for host in hosts)
    cores = cluster.shared_cores and max(1, round(cluster.shared_cores * workers / cluster.world_size))
    changed = {
        "hosts": tuple(hosts),
        "shared_cores": cores,
        **({"traffic": (), "paths": ()} if alone else {}),
    }
    return cluster.model_copy(update=changed)


def _steps_ns(job: Job, host: Cluster, steps: Sequence[Sequence[Timeline]]) -> tuple[int, ...]:
    """The lengths of steps of the ranks of ``host`` under DDP, in the mean over ranks, after one of warm-up."""
    host_job = replace(
        job, cluster=host, world_size=host.world_size, mesh={}, incidents=Incidents(),
        computation=Computation({rank: tuple(rank_steps) for rank, rank_steps in enumerate(steps)}),
    )  # fmt: skip
    graph = GraphBuilder(host, ddp_of(job).decide(host_job))
    lay_out_ranks(graph, Reactions(graph, host_job), [[rank_steps[0], *rank_steps] for rank_steps in steps])
    played = play_disturbed(graph, graph.close(), host.compute_slowdown)
    ends_ns = [played.end_ns[graph.boundaries[step]] for step in graph.common_steps]
    return tuple(max(1, round(float((end_ns - begin_ns).mean()))) for begin_ns, end_ns in pairwise(ends_ns))


def _scaled(timelines: Sequence[Timeline], factor: float, rank: int, incidents: Incidents) -> list[Timeline]:
    """The steps of a rank as they are simulated: without collectives of the script, some slow by chance."""
    count = max(len(timelines), CHANCE_STEPS) if incidents.slow_share else len(timelines)
    recorded = [timelines[step % len(timelines)] for step in range(count)]
    slow = [slowed(incidents.slow_share, incidents.slow_factor, 0, rank, step) for step in range(count)]
    return [
        _without_blocking(timeline).scaled(factor * by) for timeline, by in zip(recorded, slow, strict=True)
    ]


def _without_blocking(timeline: Timeline) -> Timeline:
    """Collectives of the script itself, such as the average of a loss, would bring all hosts together at every step."""
    items = tuple(item for item in timeline.items if item.kind != Point.BLOCKING)
    return replace(timeline, items=items)


WARM_UP, COUNTED = 10, 40  # iterations of a rank that takes the mean time
MOST_LONGER = 10  # times as long for ranks that wait for most of the time
MOST_RANK_ITERATIONS = 200_000
JITTER = 0.02
"""By what share iterations differ by chance, where it is not known, and at most. Without it, ranks with equal steps
would come at the same time for ever, in the order of their numbers, and so in groups of their own host."""
FEWEST_STEPS = 4  # of a rank that show by what share they differ

T = TypeVar("T")
Parts = Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Window:
    """From when to when (ns from the start) a job is looked at, and the seed of what happens by chance."""

    from_ns: int
    until_ns: int
    seed: int = 0


def over_a_horizon(job: Job, strategy: PartialAllReduceStrategy, window: Window | None = None) -> Outcome:
    """Simulate ``job`` for some dozens of iterations; ranks that were not recorded take the steps of those that were.

    The horizon is as long as 50 iterations of a mean rank take without communication, and at least as 10 of the slowest
    one do, and until after the last of the job's incidents; the first fifth is a warm-up. Where ranks wait for most of
    that time, it is up to ten times as long, until they have done as many: how groups fall over slow links changes from
    group to group, and a few of them say little. With a ``window`` it is that.

    Raises UserError where that would be too large, or where nobody is left at some time.
    """
    timelines = job.steps.timelines
    names = sorted(timelines)
    rank_timelines = [
        timelines.get(rank) or timelines[names[rank % len(names)]] for rank in range(job.world_size)
    ]
    if strategy.within_hosts and job.world_size > 1:
        return _of_hosts(job, strategy, rank_timelines, window)
    parts = {
        id(steps_of_rank): [parts_of(timeline) for timeline in steps_of_rank]
        for steps_of_rank in rank_timelines
    }
    steps = [parts[id(steps_of_rank)] for steps_of_rank in rank_timelines]
    factors = {rank: job.steps.factor_of(rank) for rank in range(job.world_size)}
    return _played(job, strategy, job.on, steps, factors, job.incidents, window=window)


def _of_hosts(
    job: Job,
    strategy: PartialAllReduceStrategy,
    timelines: Sequence[Sequence[Timeline]],
    window: Window | None,
) -> Outcome:
    """The same where hosts are the workers; rates and waits are told of ranks, groups and models of hosts.

    A rank stands still for its host's all-reduces too.
    """
    workers = strategy.workers(job)
    strategy.decide(job)  # says why there are no two hosts, before anything is simulated
    size_bytes = averaged_bytes(job.model, strategy)
    of_hosts = steps_of_hosts(job, workers, timelines, size_bytes)
    steps = [[((Part.REST, step_ns),) for step_ns in of_host.steps_ns] for of_host in of_hosts]
    outcome = _played(
        job, strategy, cluster_of_hosts(job.on), steps, {}, _of_workers(job.incidents, workers),
        [steps_of_host.hand_down_ns for steps_of_host in of_hosts], window,
    )  # fmt: skip
    in_host_ns = [
        iterations
        * max(0, sum(host.steps_ns) / len(host.steps_ns) - _computes_ns(job, rank, timelines[rank]))
        for host, ranks, iterations in zip(of_hosts, workers, outcome.iterations, strict=True)
        for rank in ranks
    ]
    for_groups_ns = _of_ranks(outcome.standing_ns, workers)
    return replace(
        outcome,
        finished_ns=_of_ranks(outcome.finished_ns, workers),
        standing_ns=[round(sum(both_ns)) for both_ns in zip(for_groups_ns, in_host_ns, strict=True)],
        forming_ns=_of_ranks(outcome.forming_ns, workers),
    )


def _computes_ns(job: Job, rank: int, timelines: Sequence[Timeline]) -> float:
    """How long a mean step of ``rank`` takes without any communication."""
    incidents = job.incidents
    factor = job.steps.factor_of(rank) * (1 + incidents.slow_share * (incidents.slow_factor - 1))
    return (
        factor * sum(time_ns for timeline in timelines for _, time_ns in parts_of(timeline)) / len(timelines)
    )


def _of_ranks(of_hosts: Sequence[T], workers: Sequence[Sequence[int]]) -> list[T]:
    return [of_host for of_host, ranks in zip(of_hosts, workers, strict=True) for _ in ranks]


def _of_workers(incidents: Incidents, workers: Sequence[Sequence[int]]) -> Incidents:
    """What happens to hosts: one of which a rank dies has left the job. Slow steps are in those that were simulated.

    Raises UnsupportedError where ranks join.
    """
    if incidents.joins:
        raise UnsupportedError(
            "ranks of hosts that are workers cannot join", got=", ".join(incidents.describe()),
            expected="deaths alone", fix="Leave joins: out, or within_hosts.",
        )  # fmt: skip
    first_ns = {
        number: min(time_ns for time_ns, rank in incidents.deaths if rank in ranks)
        for number, ranks in enumerate(workers)
        if any(rank in ranks for _, rank in incidents.deaths)
    }
    return Incidents(deaths=tuple(sorted((time_ns, number) for number, time_ns in first_ns.items())))


def _played(
    job: Job, strategy: PartialAllReduceStrategy, cluster: Cluster, steps: Sequence[Sequence[Parts]],
    factors: Mapping[int, float], incidents: Incidents, hand_down_ns: Sequence[int] = (),
    window: Window | None = None,
) -> Outcome:  # fmt: skip
    """Simulate workers that compute ``steps``, ``factors`` times as long, one on each rank of ``cluster``."""
    lengths_ns = [
        factors.get(worker, 1.0) * sum(time_ns for parts in step for _, time_ns in parts) / len(step)
        for worker, step in enumerate(steps)
    ]
    mean_ns = sum(lengths_ns) / len(lengths_ns)
    until_ns = max(round((WARM_UP + COUNTED) * mean_ns), round(10 * max(lengths_ns)), 10)
    _check_somebody_stays(incidents, len(steps))
    until_ns = max(until_ns, incidents.last_ns + until_ns // 5)  # so that what follows from the last is seen
    if window is not None:
        until_ns = window.until_ns
    expected = sum(until_ns / max(1.0, length_ns) for length_ns in lengths_ns)
    if expected > MOST_RANK_ITERATIONS:
        raise UserError(
            "the simulation would be too large", got=f"about {expected:.1e} iterations of ranks",
            expected=f"at most {MOST_RANK_ITERATIONS}", fix="Replay fewer workers.",
        )  # fmt: skip
    size_bytes = averaged_bytes(job.model, strategy)
    schedule, jitter = strategy.decide(job), jitter_of(steps)

    def play(until_ns: int) -> Outcome:
        scenario = Scenario(
            until_ns, from_ns=until_ns // 5 if window is None else window.from_ns,
            deaths=incidents.deaths, joins=incidents.joins, slow_share=incidents.slow_share,
            slow_factor=incidents.slow_factor, jitter=jitter, seed=0 if window is None else window.seed,
        )  # fmt: skip
        iterations = Iterations(steps, scenario, factors)
        return CoSimulation(
            cluster, schedule, iterations, size_bytes, strategy.staleness, hand_down_ns=hand_down_ns
        ).play()

    outcome = play(until_ns)
    done = sum(outcome.iterations) / len(steps)
    if window is not None or incidents.ranks or done >= COUNTED / 2:
        return outcome
    return play(round(until_ns * min(MOST_LONGER, COUNTED / max(1, done))))


def jitter_of(steps: Sequence[Sequence[Parts]]) -> float:
    """By what share iterations of a typical worker differ by chance, as its steps show.

    Ranks over a slow link that are released together come back together, and are in a group again, unless chance parts
    them: with more of it than there is, such groups look slower or faster than they are.
    """
    shares = []
    for step in steps:
        if len(step) >= FEWEST_STEPS:
            times_ns = [sum(time_ns for _, time_ns in parts) for parts in step]
            typical_ns = median(times_ns)
            # Of what lies evenly within a share of the typical time, half is within half of it.
            shares.append(2 * median(abs(time_ns - typical_ns) for time_ns in times_ns) / max(1, typical_ns))
    return min(JITTER, median(shares)) if shares else JITTER


def _check_somebody_stays(incidents: Incidents, world_size: int) -> None:
    """Raise UserError where at some time no rank is there."""
    moments = sorted({0, *(time_ns for time_ns, _ in (*incidents.deaths, *incidents.joins))})
    always = world_size - len(incidents.ranks)
    for moment_ns in moments:
        if always + sum(_is_there(incidents.of(rank), moment_ns) for rank in incidents.ranks) < 1:
            raise UserError(
                "no rank is left", got=f"{', '.join(incidents.describe())}", expected="one that trains at any time",
                fix="Let fewer ranks die.",
            )  # fmt: skip


def _is_there(happens: Sequence[tuple[int, bool]], moment_ns: int) -> bool:
    before = [is_join for time_ns, is_join in happens if time_ns <= moment_ns]
    return before[-1] if before else not happens[0][1]
