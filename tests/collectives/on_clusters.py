"""Clusters of alike hosts, and how long collectives take on them by replay."""

from __future__ import annotations

from headway.cluster import Cluster, Host
from headway.collectives.dataflow import alone
from headway.collectives.hierarchical import Hosts
from headway.collectives.selection import Algorithms, Selection
from headway.simulation.engine import play


def cluster_of(hosts: int, workers: int = 1, **given: float) -> Cluster:
    """Links of 1 Gbit/s with 100 us of latency, memory of 20 Gbit/s with 10 us."""
    named = tuple(Host(name=f"h{n}", workers=workers, up_gbps=1, down_gbps=1) for n in range(hosts))
    rates = {"local_gbps": 20, "latency_us": 100, "local_latency_us": 10, **given}
    return Cluster.model_validate({"hosts": named, **rates})


def time_ms(cluster: Cluster, selection: Selection, size_bytes: int) -> float:
    """A collective of ``size_bytes`` with nothing else in flight."""
    graph = alone(cluster, selection.program_of, size_bytes, selection.cost(cluster))
    return float(play(graph).end_ns.max()) / 1e6


def time_us(cluster: Cluster, algorithm: str, kind: str, size_bytes: int) -> float:
    """The same of a half by ``algorithm``, as a plan would have it."""
    selection = Algorithms(algorithm, algorithm).select(kind, size_bytes, cluster.world_size)
    return 1e3 * time_ms(cluster, selection.on(Hosts.of_cluster(cluster)), size_bytes)
