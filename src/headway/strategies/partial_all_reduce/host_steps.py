"""Hosts as workers of a simulation: how long their steps under DistributedDataParallel take, each on its own links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from headway.cluster import Cluster, Host
from headway.collectives.algorithms import NCCL
from headway.errors import PlanError
from headway.graph.build import GraphBuilder, RankCursor
from headway.graph.computation import Computation
from headway.graph.disturbance import play_disturbed
from headway.graph.step_layout import lay_out_ranks
from headway.graph.timeline import Part, Point, Timeline
from headway.incidents import Incidents
from headway.job import Job
from headway.scheduling.groups import GroupSchedule
from headway.simulation.engine import play
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.ddp_steps import Reactions
from headway.strategies.slowing import slowed

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
            "the plan's hosts are not those of the cluster", got=", ".join(str(len(each)) for each in workers),
            expected=f"{', '.join(str(host.workers) for host in cluster.hosts)} ranks",
        )  # fmt: skip
    found: list[HostSteps] = []
    known: dict[tuple[object, ...], HostSteps] = {}  # hosts that are alike
    for host, ranks in zip(cluster.hosts, workers, strict=True):
        alone = _of(cluster, [host], alone=True)
        factors = tuple(job.steps.factor_of(rank) for rank in ranks)
        chance = tuple(ranks) if job.incidents.slow_share else ()
        key = (len(ranks), factors, chance, *(id(timelines[rank]) for rank in ranks))
        if key not in known:
            steps = [
                _scaled(timelines[rank], job.steps.factor_of(rank), rank, job.incidents) for rank in ranks
            ]
            known[key] = HostSteps(_steps_ns(job, alone, steps), hand_down_ns(alone, size_bytes))
        found.append(known[key])
    return found


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
    own = replace(
        job, cluster=host, world_size=host.world_size, mesh={}, incidents=Incidents(),
        computation=Computation({rank: tuple(each) for rank, each in enumerate(steps)}),
    )  # fmt: skip
    graph = GraphBuilder(host, ddp_of(job).decide(own))
    lay_out_ranks(graph, Reactions(graph, own), [[each[0], *each] for each in steps])
    played = play_disturbed(graph, graph.close(), host.compute_slowdown)
    ends_ns = [played.end_ns[graph.boundaries[step]] for step in graph.common_steps]
    return tuple(max(1, round(float((end_ns - begin_ns).mean()))) for begin_ns, end_ns in pairwise(ends_ns))


def _scaled(timelines: Sequence[Timeline], factor: float, rank: int, incidents: Incidents) -> list[Timeline]:
    """The steps of a rank as they are simulated: without collectives of the script, some slow by chance."""
    count = max(len(timelines), CHANCE_STEPS) if incidents.slow_share else len(timelines)
    own = [timelines[step % len(timelines)] for step in range(count)]
    slow = [slowed(incidents.slow_share, incidents.slow_factor, 0, rank, step) for step in range(count)]
    return [_without_blocking(each).scaled(factor * by) for each, by in zip(own, slow, strict=True)]


def _without_blocking(timeline: Timeline) -> Timeline:
    """Collectives of the script itself, such as the average of a loss, would bring all hosts together at every step."""
    items = tuple(item for item in timeline.items if item.kind != Point.BLOCKING)
    return replace(timeline, items=items)
