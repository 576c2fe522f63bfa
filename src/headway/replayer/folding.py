"""Folding: ranks that do the same at the same moment are simulated once.

Most programs of collectives rotate: shifting every rank by the same number gives the same collective again. So where
a plan has no others (``Algorithms.repeat``), and hosts and timelines repeat after some number of ranks as well,
whatever happens on one rank happens at the same moment on the one that lies so many further, but for a byte a message
where a tensor cannot be cut evenly.
"""

from __future__ import annotations

from itertools import accumulate
from math import lcm

from headway.cluster import Cluster, Host


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


def _like(host: Host) -> tuple[int, float, float]:
    return host.workers, host.up_gbps, host.down_gbps
