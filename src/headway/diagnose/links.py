"""Links: what crossed from host to host, how fast, and for how much of the step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway import intervals
from headway.cluster import Cluster
from headway.diagnose.communication import Communications
from headway.diagnose.timeline import RankTime
from headway.errors import ClusterError
from headway.trace.events import Kind
from headway.trace.format import Trace

BITS_A_NS_IN_GBPS = 8.0  # bytes a nanosecond, in Gbit/s


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two hosts, over the recorded steps.

    ``gbps`` is the goodput while a collective with all its members was under way. ``utilisation`` is the share of the
    step in which that was so; where the cluster's rates are known, it is the share of their capacity that the
    step used, and ``capacity_gbps`` is set.
    """

    source: str
    target: str
    gbps: float
    utilisation: float
    capacity_gbps: float | None = None


def find_links(
    trace: Trace, times: dict[int, RankTime], rows: Communications, cluster: Cluster | None
) -> tuple[Link, ...]:
    """Add up what each rank sends to its ring neighbour, host by host.

    A ring over P ranks sends 2(P-1)/P of an all-reduced tensor over each of its edges, and (P-1)/P of one that is
    reduce-scattered, gathered or broadcast. Where all ranks share one host, the one entry is that host's memory.
    Raises ClusterError where ``cluster`` does not fit the trace.
    """
    hosts = _hosts(trace, cluster)
    volumes = _volumes(rows)
    targets = _ring_targets(rows)
    within = np.zeros(len(rows))
    for rank, time in times.items():
        own = rows.rank == rank
        windows = intervals.union(time.step_start_ns, time.step_end_ns)
        ends = np.maximum(rows.end_ns[own], rows.arrival_ns[own])
        covered = intervals.length_within(windows, rows.arrival_ns[own], ends)
        within[own] = covered / np.maximum(ends - rows.arrival_ns[own], 1)
    moved = volumes * within
    crossing: dict[tuple[str, str], list[int]] = {}
    sending = np.flatnonzero((moved > 0) & (targets >= 0))
    for row, rank, target in zip(
        sending.tolist(), rows.rank[sending].tolist(), targets[sending].tolist(), strict=True
    ):
        if rank in hosts and target in hosts:
            crossing.setdefault((hosts[rank], hosts[target]), []).append(row)
    apart = any(source != target for source, target in crossing)
    capacities = _capacities(cluster)
    found = []
    for (source, target), indices in sorted(crossing.items()):
        if source == target and apart:
            continue  # memory, not a link
        picked = np.array(indices)
        senders = [times[rank] for rank in sorted(set(rows.rank[picked].tolist()))]
        windows = intervals.join(*(intervals.union(time.step_start_ns, time.step_end_ns) for time in senders))
        active = intervals.intersect(intervals.union(rows.arrival_ns[picked], rows.end_ns[picked]), windows)
        active_ns, whole_ns = intervals.length_ns(active), intervals.length_ns(windows)
        if active_ns == 0:
            continue
        moved_bytes = float(moved[picked].sum())
        gbps = BITS_A_NS_IN_GBPS * moved_bytes / active_ns
        capacity = capacities.get((source, target))
        share = active_ns / whole_ns
        if capacity is not None:
            share = BITS_A_NS_IN_GBPS * moved_bytes / whole_ns / capacity
        found.append(Link(source, target, gbps, share, capacity))
    return tuple(found)


def _hosts(trace: Trace, cluster: Cluster | None) -> dict[int, str]:
    if cluster is None:
        return trace.hosts
    if cluster.world_size != trace.world_size:
        raise ClusterError(
            "the cluster does not fit the trace",
            got=f"{cluster.world_size} workers in the cluster",
            expected=f"{trace.world_size}, as recorded",
            fix="Give the cluster that the trace was recorded on, or none.",
        )
    return {rank: cluster.hosts[index].name for rank, index in enumerate(cluster.host_of_rank)}


def _capacities(cluster: Cluster | None) -> dict[tuple[str, str], float]:
    if cluster is None:
        return {}
    return {
        (a.name, b.name): cluster.local_gbps if a is b else min(a.up_gbps, b.down_gbps)
        for a in cluster.hosts
        for b in cluster.hosts
    }


def _volumes(rows: Communications) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The bytes that each row's rank sends to its ring neighbour, or to its peer."""
    members = np.bincount(rows.instance, minlength=1)[rows.instance] if len(rows) else np.zeros(0)
    factors = np.where(rows.name == "all_reduce", 2.0, 1.0) * (members - 1) / np.maximum(members, 1)
    factors = np.where(rows.kind == Kind.SEND, 1.0, factors)
    factors = np.where(rows.kind == Kind.RECEIVE, 0.0, factors)
    volumes: np.ndarray[tuple[int], np.dtype[np.float64]] = rows.size_bytes * factors
    return volumes


def _ring_targets(rows: Communications) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The rank to which each row's rank sends: the next member of the instance, or the peer."""
    targets = np.where(rows.kind == Kind.SEND, rows.peer, -1)
    order = np.lexsort((rows.rank, rows.instance))
    instance, rank = rows.instance[order], rows.rank[order]
    first = np.searchsorted(instance, instance, side="left")
    following = np.arange(1, len(order) + 1)
    follows = np.append(instance[1:] == instance[:-1], False) if len(order) else np.zeros(0, dtype=bool)
    following = np.where(follows, following, first)
    collective = rows.kind[order] == Kind.COLLECTIVE
    targets[order[collective]] = rank[following[collective]]
    return targets
