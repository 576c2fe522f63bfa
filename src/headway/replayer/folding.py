"""Folding: ranks that do the same at the same moment are simulated once.

Most programs of collectives rotate: shifting every rank by the same number gives the same collective again. So where
a plan has no others (``Algorithms.repeat``), and hosts and timelines repeat after some number of ranks as well,
whatever happens on one rank happens at the same moment on the one that lies so many further, but for a byte a message
where a tensor cannot be cut evenly. The same holds of pipelines side by side that lie on ranks in this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import lcm

from headway.cluster import Cluster, Host
from headway.scheduling.buckets import BucketSchedule
from headway.scheduling.pipeline.replicated import ReplicatedSchedule
from headway.scheduling.schedule import Schedule


def period_of(cluster: Cluster, timelines: int) -> int:
    """After how many ranks everything repeats: hosts, and ``timelines`` that ranks have in turn.

    The number of all ranks where nothing does. A single host has no link, and its ranks are alike.
    """
    world_size = cluster.world_size
    if cluster.traffic or cluster.paths:
        return world_size
    hosts = [_like(host) for host in cluster.hosts]
    ends = [1] if len(hosts) == 1 else list(accumulate(workers for workers, _, _ in hosts))
    for count, ranks in enumerate(ends, 1):
        period = lcm(ranks, timelines)
        alike = len(hosts) == 1 or (
            len(hosts) % count == 0 and all(host == hosts[at % count] for at, host in enumerate(hosts))
        )
        if alike and world_size % period == 0:
            return period
    return world_size


def played_ranks(cluster: Cluster, schedule: Schedule, timelines: int) -> int:
    """How many ranks are to be played, each for those that do the same at the same moment: all where none do.

    ``timelines`` is the number of those that ranks have in turn. Of pipelines side by side whole ones are played.
    """
    buckets: Sequence[BucketSchedule] = ()
    if isinstance(schedule, ReplicatedSchedule):
        buckets = schedule.buckets
    elif isinstance(schedule, BucketSchedule):
        buckets = (schedule,)
    # Servers' shares differ from rank to rank, and hosts without workers serve all ranks.
    if not buckets or any(
        each.serving.shares or each.serving.hosts is not None or not each.algorithms.repeat
        for each in buckets
    ):
        return cluster.world_size
    if not isinstance(schedule, ReplicatedSchedule):
        return period_of(cluster, timelines)
    pipelines, stages = schedule.pipelines, len(schedule.pipeline.ranks)
    if len(pipelines) == 1 or timelines == cluster.world_size:
        return cluster.world_size
    period = period_of(cluster, lcm(timelines, stages))
    count = period // stages
    shifted = all(
        own == tuple(rank + period for rank in before)
        for before, own in zip(pipelines, pipelines[count:], strict=False)
    )
    return period if shifted else cluster.world_size


def _like(host: Host) -> tuple[int, float, float]:
    return host.workers, host.up_gbps, host.down_gbps
