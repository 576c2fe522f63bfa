"""Measures the traffic between hosts: goodput and utilisation of each link, per direction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from headway import intervals
from headway.arrays import Floats
from headway.cluster import Cluster
from headway.diagnosis.breakdown import RankTime
from headway.diagnosis.communication import Communications
from headway.errors import ClusterError
from headway.trace.events import Events, Kind, inner_messages
from headway.trace.format import Trace

BITS_A_NS_IN_GBPS = 8.0  # bytes a nanosecond, in Gbit/s


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two hosts, over the recorded steps.

    ``gbps`` is the goodput while the link was in use. ``utilisation`` is the share of step time in which it was; if
    ``capacity_gbps`` is known, it is the share of the link's capacity that was used.
    """

    source: str
    target: str
    gbps: float
    utilisation: float
    capacity_gbps: float | None = None


@dataclass(slots=True)
class _Use:
    """The traffic from one host to another: its senders, bytes and active time."""

    senders: set[int] = field(default_factory=set)
    moved_bytes: float = 0.0
    active_ns: float = 0.0


_Uses = dict[tuple[str, str], _Use]


def find_links(
    trace: Trace, times: dict[int, RankTime], rows: Communications, cluster: Cluster | None
) -> tuple[Link, ...]:
    """Adds up the traffic between hosts. ``rows`` is ``match(trace)``.

    A rank's traffic comes from the first source its recording has: the kernel's counters per connection (``link``
    events), the messages of its collectives, or the assumption that collectives are rings (``sent_volumes``). With
    kernel counters, a link is in use while a connection is busy; connections are assumed to be busy independently, and
    for at least their delivery time. Otherwise it is in use while a collective with all its members is in flight.

    If all ranks share one host, the only entry is that host's memory. Raises ClusterError if ``cluster`` does not
    match the trace.
    """
    hosts = _hosts(trace, cluster)
    uses: _Uses = {}
    counted = [rank for rank in times if (trace.events[rank].kind == Kind.LINK).any()]
    _add_connections(uses, trace, times, counted, hosts)
    _add_collectives(uses, trace, times, counted, rows, hosts)
    apart = any(source != target for source, target in uses)
    capacities = _capacities(cluster)
    links = []
    for (source, target), use in sorted(uses.items()):
        if (source == target and apart) or use.active_ns <= 0:
            continue  # memory is no link
        windows = intervals.join(*(_windows(times[rank]) for rank in sorted(use.senders)))
        whole_ns = intervals.length_ns(windows)
        gbps = BITS_A_NS_IN_GBPS * use.moved_bytes / use.active_ns
        capacity = capacities.get((source, target))
        share = min(use.active_ns / whole_ns, 1.0)
        if capacity is not None:
            share = BITS_A_NS_IN_GBPS * use.moved_bytes / whole_ns / capacity
        links.append(Link(source, target, gbps, share, capacity))
    return tuple(links)


def _add_connections(
    uses: _Uses, trace: Trace, times: dict[int, RankTime], counted: list[int], hosts: dict[int, str]
) -> None:
    """Adds the kernel's connection counters of the ranks ``counted``."""
    idle: dict[tuple[str, str, int], tuple[Floats, int]] = {}  # shares of a step, and its length
    for rank in counted:
        time, rows = times[rank], trace.events[rank].of_kind(Kind.LINK)
        steps = np.searchsorted(time.step_start_ns, rows.start_ns, side="right") - 1
        within = (steps >= 0) & (rows.start_ns < time.step_end_ns[np.maximum(steps, 0)])
        within &= (rows.size_bytes > 0) & (rows.duration_ns > 0)
        rows, steps = rows.where(within), steps[within]
        lengths = (time.step_end_ns - time.step_start_ns)[steps]
        shares = np.minimum(np.stack([rows.duration_ns, _least_ns(trace.events[rank], rows)]) / lengths, 1.0)
        for row, peer in enumerate(rows.peer.tolist()):
            if rank not in hosts or peer not in hosts:
                continue
            ends = hosts[rank], hosts[peer]
            use = uses.setdefault(ends, _Use())
            use.senders.add(rank)
            use.moved_bytes += float(rows.size_bytes[row])
            before, longest_ns = idle.get((*ends, int(steps[row])), (np.ones(2), 0))
            idle[*ends, int(steps[row])] = before * (1 - shares[:, row]), max(longest_ns, int(lengths[row]))
    active_ns: dict[tuple[str, str], Floats] = {}
    for (source, target, _), (share, length_ns) in idle.items():
        active_ns[source, target] = active_ns.get((source, target), np.zeros(2)) + (1 - share) * length_ns
    for ends, in_use_ns in active_ns.items():
        uses[ends].active_ns += float(in_use_ns.max())


def _least_ns(events: Events, rows: Events) -> Floats:
    """The least time that ``rows`` took, from the kernel's delivery rate; 0 if unknown.

    The kernel counts busy time in ticks of some milliseconds, which may miss short transfers.
    """
    rates = events.of_kind(Kind.DELIVERY_RATE)
    measured = zip(rates.peer.tolist(), rates.step.tolist(), rates.size_bytes.tolist(), strict=True)
    rate_of = {(peer, step): rate for peer, step, rate in measured if rate > 0}
    keys = zip(rows.peer.tolist(), rows.step.tolist(), strict=True)
    rate = np.array([rate_of.get(key, np.inf) for key in keys], dtype=np.float64)
    least_ns: Floats = rows.size_bytes / rate * 1e9
    return least_ns


def _add_collectives(
    uses: _Uses,
    trace: Trace,
    times: dict[int, RankTime],
    counted: list[int],
    rows: Communications,
    hosts: dict[int, str],
) -> None:
    """Adds the collectives and messages of all ranks except those ``counted``."""
    within = np.zeros(len(rows))
    for rank, time in times.items():
        of_rank = rows.rank == rank
        ends = np.maximum(rows.end_ns[of_rank], rows.arrival_ns[of_rank])
        covered = intervals.length_within(_windows(time), rows.arrival_ns[of_rank], ends)
        within[of_rank] = covered / np.maximum(ends - rows.arrival_ns[of_rank], 1)
    crossing: dict[tuple[str, str], tuple[list[int], list[float]]] = {}
    for row, target, size_bytes in _sent(trace, rows, counted):
        rank, moved_bytes = int(rows.rank[row]), size_bytes * float(within[row])
        if moved_bytes > 0 and rank in hosts and target in hosts:
            picked, moved = crossing.setdefault((hosts[rank], hosts[target]), ([], []))
            picked.append(row)
            moved.append(moved_bytes)
    for ends, (picked, moved) in crossing.items():
        indices = np.unique(picked)
        senders = set(rows.rank[indices].tolist())
        windows = intervals.join(*(_windows(times[rank]) for rank in sorted(senders)))
        active = intervals.intersect(intervals.union(rows.arrival_ns[indices], rows.end_ns[indices]), windows)
        if active_ns := intervals.length_ns(active):
            use = uses.setdefault(ends, _Use())
            use.senders |= senders
            use.moved_bytes += sum(moved)
            use.active_ns += active_ns


def _sent(trace: Trace, rows: Communications, but: list[int]) -> Iterator[tuple[int, int, float]]:
    """What all ranks except ``but`` sent: row, receiver and bytes."""
    wanted = ~np.isin(rows.rank, but)
    by_messages = np.zeros(len(rows), dtype=bool)
    for rank in np.unique(rows.rank[wanted]).tolist():
        events = trace.events[rank]
        sends = events.where(inner_messages(events) & (events.kind == Kind.SEND))
        if not len(sends):
            continue
        rows_of: dict[tuple[str, str, int], list[int]] = {}
        for row in np.flatnonzero((rows.rank == rank) & (rows.kind == Kind.COLLECTIVE)).tolist():
            rows_of.setdefault((rows.group[row], rows.name[row], int(rows.sequence[row])), []).append(row)
        for send in sends:
            same = rows_of[send.group, send.name, send.sequence]
            by_messages[same] = True
            yield same[0], send.peer, max(send.size_bytes, 0)
    volumes, targets = sent_volumes(rows), ring_targets(rows)
    for row in np.flatnonzero(wanted & ~by_messages & (volumes > 0) & (targets >= 0)).tolist():
        yield row, int(targets[row]), float(volumes[row])


def _windows(time: RankTime) -> intervals.Spans:
    return intervals.union(time.step_start_ns, time.step_end_ns)


def _hosts(trace: Trace, cluster: Cluster | None) -> dict[int, str]:
    if cluster is None:
        return trace.hosts
    if cluster.world_size != trace.world_size:
        raise ClusterError(
            "the cluster does not match the trace",
            got=f"{cluster.world_size} workers in the cluster",
            expected=f"{trace.world_size} workers, as recorded",
            fix="Pass the cluster on which the trace was recorded, or omit it.",
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


def sent_volumes(rows: Communications) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The bytes that each row's rank sends: to its ring neighbour for a collective, to its peer for a message.

    A ring over P ranks, recorded or not, sends 2(P-1)/P of an all-reduced tensor over each edge, and (P-1)/P of a
    tensor that is reduce-scattered, gathered or broadcast.
    """
    factors = np.where(rows.name == "all_reduce", 2.0, 1.0) * (rows.members - 1) / np.maximum(rows.members, 1)
    factors = np.where(rows.kind == Kind.SEND, 1.0, factors)
    factors = np.where(rows.kind == Kind.RECEIVE, 0.0, factors)
    volumes: np.ndarray[tuple[int], np.dtype[np.float64]] = rows.size_bytes * factors
    return volumes


def ring_targets(rows: Communications) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The rank to which each row's rank sends: the next member of its group, or the peer; -1 if unknown."""
    return np.where(rows.kind == Kind.SEND, rows.peer, rows.next_rank)
