"""Predicts the time of a single collective on a cluster, its algorithm, and a lower bound."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np

from headway.cluster import Cluster
from headway.collectives.algorithms import ALL_REDUCE, KINDS
from headway.collectives.dataflow import alone
from headway.collectives.nccl import Kind, choose, fabric_of
from headway.collectives.selection import native
from headway.errors import UserError
from headway.simulation.engine import play
from headway.simulator.expectation import collectives_error


@dataclass(frozen=True)
class CollectiveTime:
    """The predicted time of a collective over the whole cluster. ``size_bytes`` is the size of the full tensor.

    ``uncertainty_us`` covers 85 of 100 published measurements, with or without fitted logs. ``bound_us`` is a lower bound
    for all algorithms that reduce on the workers: the bytes that each host has to send, divided by its rate.
    """

    kind: str
    size_bytes: int
    workers: int
    hosts: int
    algorithm: str
    protocol: str  # of NCCL; "" for other libraries
    time_us: float
    uncertainty_us: float
    bound_us: float

    @property
    def tensor_gb_s(self) -> float:
        """Tensor size divided by time (algbw in nccl-tests)."""
        return self.size_bytes / self.time_us / 1e3

    @property
    def bus_gb_s(self) -> float:
        """The bytes that each worker of a ring sends, divided by time (busbw in nccl-tests)."""
        return self.tensor_gb_s * _sent_share(self.kind, self.workers)

    def to_document(self) -> dict[str, Any]:
        """The output of ``headway predict --collective --json``."""
        document = {("collective" if name == "kind" else name): value for name, value in asdict(self).items()}
        return {**document, "tensor_gb_s": self.tensor_gb_s, "bus_gb_s": self.bus_gb_s}


def collective_time(cluster: Cluster, name: str, size_bytes: int) -> CollectiveTime:
    """Predict the library's collective ``name``, such as "all-gather", over all workers of ``cluster``.

    Raises UserError for an unknown collective, and for a cluster with a single worker.
    """
    kind = name.replace("-", "_").lower()
    if kind not in KINDS:
        raise UserError(
            "--collective: unknown name",
            got=repr(name),
            expected=", ".join(known_kind.replace("_", "-") for known_kind in KINDS),
        )
    workers, hosts = cluster.world_size, len(cluster.hosts)
    if workers < 2:
        raise UserError(
            "a collective needs several workers", got="a cluster with one worker", expected="two or more"
        )
    bound_us = _bound_us(cluster, kind, size_bytes)
    if cluster.nccl is not None:
        a_host = max(host.workers for host in cluster.hosts)
        fabric = fabric_of(cluster, range(hosts), a_host)
        taken = choose(cast("Kind", kind), size_bytes, a_host * hosts, hosts, fabric)
        return CollectiveTime(
            kind, size_bytes, workers, hosts, taken.algorithm, taken.protocol, taken.time_us,
            taken.time_us * collectives_error(cluster), min(bound_us, taken.time_us),
        )  # fmt: skip
    selection = native(kind, size_bytes, workers, cluster.library)
    graph = alone(cluster, selection.program_of, size_bytes, selection.cost(cluster))
    time_us = float(np.max(play(graph).end_ns)) / 1e3
    error_us = time_us * collectives_error(cluster)
    return CollectiveTime(
        kind, size_bytes, workers, hosts, "ring", "", time_us, error_us, min(bound_us, time_us)
    )


def _sent_share(kind: str, ranks: int) -> float:
    return (2 if kind == ALL_REDUCE else 1) * (ranks - 1) / ranks


def _bound_us(cluster: Cluster, kind: str, size_bytes: int) -> float:
    """The time in us that the slowest host (or a worker inside a single host) needs to send its data."""
    if len(cluster.hosts) == 1:
        reduces = cluster.nccl is not None and cluster.nccl.nvls
        share = 1.0 if reduces and kind == ALL_REDUCE else _sent_share(kind, cluster.world_size)
        gb_s = cluster.nccl.inside_gb_s if cluster.nccl is not None else cluster.local_gbps / 8
        return size_bytes * share / gb_s / 1e3
    gbps = min(min(host.up_gbps, host.down_gbps) for host in cluster.hosts)
    return size_bytes * _sent_share(kind, len(cluster.hosts)) * 8 / gbps / 1e3
