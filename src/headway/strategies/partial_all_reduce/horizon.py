"""Simulates a job under partial all-reduce over a time horizon, for replay and predictions."""

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
from headway.strategies.ddp_steps import Reactions
from headway.strategies.horizon import Outcome
from headway.strategies.partial_all_reduce.cosimulation import CoSimulation, Iterations, Scenario, parts_of
from headway.strategies.partial_all_reduce.plugin import averaged_bytes
from headway.strategies.partial_all_reduce.policy import PartialAllReduceStrategy

CHANCE_STEPS = 60  # steps simulated if some are randomly slow


@dataclass(frozen=True, slots=True)
class HostSteps:
    """Step times of a host, repeated in order, and the time to broadcast a model to its ranks (ns)."""

    steps_ns: tuple[int, ...]
    hand_down_ns: int


def ddp_of(job: Job) -> DistributedDataParallelStrategy:
    """Return the gradient reduction within a host: torch's default buckets, or as recorded without parameters."""
    return DistributedDataParallelStrategy(bucket_cap_mb=None if job.has_parameters else 0)


def cluster_of_hosts(cluster: Cluster) -> Cluster:
    """Return the cluster with one worker per host: the first rank, which alone talks to other hosts."""
    hosts = [host.model_copy(update={"workers": 1}) for host in cluster.hosts]
    return _of(cluster, hosts, alone=False)


def steps_of_hosts(
    job: Job, workers: Sequence[Sequence[int]], timelines: Sequence[Sequence[Timeline]], size_bytes: int
) -> list[HostSteps]:
    """Simulate the steps ``timelines[rank]`` on each host of ``job``, whose ranks are ``workers[host]``.

    ``size_bytes`` are broadcast within a host. Raises PlanError if ``workers`` do not match the job's cluster.
    """
    cluster = job.on
    if [len(ranks) for ranks in workers] != [host.workers for host in cluster.hosts]:
        raise PlanError(
            "hosts of the plan do not match the cluster", got=", ".join(str(len(worker)) for worker in workers),
            expected=f"{', '.join(str(host.workers) for host in cluster.hosts)} ranks",
        )  # fmt: skip
    host_steps: list[HostSteps] = []
    cache: dict[tuple[object, ...], HostSteps] = {}  # identical hosts
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
    """Time in which the first rank of ``host`` broadcasts ``size_bytes`` to the others.

    Gloo uses a binomial tree: in each level, every rank with the data sends it to one more. NCCL pipelines pieces, which
    takes about as long as one message.
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
    """Replace the hosts of ``cluster`` and scale shared cores. With ``alone``, drop traffic between hosts."""
    workers = sum(host.workers for host in hosts)
    cores = cluster.shared_cores and max(1, round(cluster.shared_cores * workers / cluster.world_size))
    changed = {
        "hosts": tuple(hosts),
        "shared_cores": cores,
        **({"traffic": (), "paths": ()} if alone else {}),
    }
    return cluster.model_copy(update=changed)


def _steps_ns(job: Job, host: Cluster, steps: Sequence[Sequence[Timeline]]) -> tuple[int, ...]:
    """Step times on ``host`` under DDP (ns), averaged over ranks, after one warm-up step."""
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
    """Steps of a rank without the script's own collectives; some are randomly slow."""
    count = max(len(timelines), CHANCE_STEPS) if incidents.slow_share else len(timelines)
    recorded = [timelines[step % len(timelines)] for step in range(count)]
    slow = [slowed(incidents.slow_share, incidents.slow_factor, 0, rank, step) for step in range(count)]
    return [
        _without_blocking(timeline).scaled(factor * by) for timeline, by in zip(recorded, slow, strict=True)
    ]


def _without_blocking(timeline: Timeline) -> Timeline:
    """Drop the script's own collectives, such as averaging a loss: they would synchronise all hosts in every step."""
    items = tuple(item for item in timeline.items if item.kind != Point.BLOCKING)
    return replace(timeline, items=items)


WARM_UP, COUNTED = 10, 40  # iterations of a mean rank
MOST_LONGER = 10  # largest extension of the horizon if ranks mostly wait
MOST_RANK_ITERATIONS = 200_000
JITTER = 0.02
"""Random variation of iterations: the default, and the upper bound. Without it, ranks with equal steps would always
arrive together in rank order, and so form groups within hosts."""
FEWEST_STEPS = 4  # of a rank needed to estimate the jitter

T = TypeVar("T")
StepParts = Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Window:
    """Observed time span (ns from the start), and the seed of random events."""

    from_ns: int
    until_ns: int
    seed: int = 0


def over_a_horizon(job: Job, strategy: PartialAllReduceStrategy, window: Window | None = None) -> Outcome:
    """Simulate ``job`` for some dozens of iterations; ranks that were not recorded reuse recorded steps.

    The horizon covers 50 iterations of a mean rank without communication, at least 10 iterations of the slowest rank,
    and all incidents of the job; the first fifth is a warm-up. If ranks mostly wait, it is extended up to tenfold until
    they finish about as many iterations, since a few groups over slow links say little. ``window`` overrides this.

    Raises UserError if the simulation is too large, or if no rank is left at some time.
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
    """Simulate with hosts as workers. Rates and waits are per rank; groups and models are per host.

    Waits of a rank include the all-reduces within its host.
    """
    workers = strategy.workers(job)
    strategy.decide(job)  # raises before the simulation if there is only one host
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
    """Mean computation time of a step of ``rank`` (ns), without communication."""
    incidents = job.incidents
    factor = job.steps.factor_of(rank) * (1 + incidents.slow_share * (incidents.slow_factor - 1))
    return (
        factor * sum(time_ns for timeline in timelines for _, time_ns in parts_of(timeline)) / len(timelines)
    )


def _of_ranks(of_hosts: Sequence[T], workers: Sequence[Sequence[int]]) -> list[T]:
    return [of_host for of_host, ranks in zip(of_hosts, workers, strict=True) for _ in ranks]


def _of_workers(incidents: Incidents, workers: Sequence[Sequence[int]]) -> Incidents:
    """Translate incidents of ranks to hosts: a host dies with its first rank that dies. Slow steps are simulated already.

    Raises UnsupportedError if ranks join.
    """
    if incidents.joins:
        raise UnsupportedError(
            "ranks cannot join with within_hosts", got=", ".join(incidents.describe()),
            expected="only deaths", fix="Remove joins or within_hosts.",
        )  # fmt: skip
    first_ns = {
        number: min(time_ns for time_ns, rank in incidents.deaths if rank in ranks)
        for number, ranks in enumerate(workers)
        if any(rank in ranks for _, rank in incidents.deaths)
    }
    return Incidents(deaths=tuple(sorted((time_ns, number) for number, time_ns in first_ns.items())))


def _played(
    job: Job, strategy: PartialAllReduceStrategy, cluster: Cluster, steps: Sequence[Sequence[StepParts]],
    factors: Mapping[int, float], incidents: Incidents, hand_down_ns: Sequence[int] = (),
    window: Window | None = None,
) -> Outcome:  # fmt: skip
    """Simulate workers that compute ``steps``, scaled by ``factors``, one on each rank of ``cluster``."""
    lengths_ns = [
        factors.get(worker, 1.0) * sum(time_ns for parts in step for _, time_ns in parts) / len(step)
        for worker, step in enumerate(steps)
    ]
    mean_ns = sum(lengths_ns) / len(lengths_ns)
    until_ns = max(round((WARM_UP + COUNTED) * mean_ns), round(10 * max(lengths_ns)), 10)
    _check_somebody_stays(incidents, len(steps))
    until_ns = max(until_ns, incidents.last_ns + until_ns // 5)  # to show the effects of the last one
    if window is not None:
        until_ns = window.until_ns
    expected = sum(until_ns / max(1.0, length_ns) for length_ns in lengths_ns)
    if expected > MOST_RANK_ITERATIONS:
        raise UserError(
            "the simulation is too large", got=f"about {expected:.1e} rank iterations",
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


def jitter_of(steps: Sequence[Sequence[StepParts]]) -> float:
    """Estimate the random variation of iterations of a typical worker from its steps, at most ``JITTER``.

    Ranks that are released together over a slow link arrive together again and stay in one group unless jitter separates
    them, so wrong jitter makes such groups look faster or slower than they are.
    """
    shares = []
    for step in steps:
        if len(step) >= FEWEST_STEPS:
            times_ns = [sum(time_ns for _, time_ns in parts) for parts in step]
            typical_ns = median(times_ns)
            # Of a uniform distribution, half lies within half of its width.
            shares.append(2 * median(abs(time_ns - typical_ns) for time_ns in times_ns) / max(1, typical_ns))
    return min(JITTER, median(shares)) if shares else JITTER


def _check_somebody_stays(incidents: Incidents, world_size: int) -> None:
    """Raise UserError if no rank is present at some time."""
    moments = sorted({0, *(time_ns for time_ns, _ in (*incidents.deaths, *incidents.joins))})
    always = world_size - len(incidents.ranks)
    for moment_ns in moments:
        if always + sum(_is_there(incidents.of(rank), moment_ns) for rank in incidents.ranks) < 1:
            raise UserError(
                "no rank is left", got=f"{', '.join(incidents.describe())}", expected="one training rank at all times",
                fix="Let fewer ranks die.",
            )  # fmt: skip


def _is_there(happens: Sequence[tuple[int, bool]], moment_ns: int) -> bool:
    before = [is_join for time_ns, is_join in happens if time_ns <= moment_ns]
    return before[-1] if before else not happens[0][1]
