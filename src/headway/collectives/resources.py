"""Models the links and cores of a cluster as resources of an operation graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from headway.arrays import Ints
from headway.cluster import AlgorithmCost, Cluster, Traffic, Ways
from headway.collectives.algorithms import ALL_REDUCE
from headway.collectives.nccl import Kind, choose, fabric_of
from headway.collectives.program import ProgramColumns, ProgramOf, columns_of, message_bytes
from headway.simulation.building import (
    LATEST_NS,
    NO_RESOURCE,
    WHOLE,
    Numbers,
    OperationGraphBuilder,
    Resources,
    RouteTable,
)

MOST_LAID_OUT_BYTES = 2**28
ROUTE_BYTES = 400  # size of two routes in their table
CollectiveKey = tuple[ProgramOf, int, AlgorithmCost, int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """Messages as columns of one shape: durations and routes."""

    duration_ns: Ints
    route: Numbers


class ClusterResources:
    """The resources of a cluster: two per host (its link up and down) and two per rank (local sends, cores).

    Rates inside a host are measured per sender under full contention, so every rank has its own resource for local
    sends. The CPU cost of collectives and messages queues for a rank's cores. Messages between two ranks on one
    connection follow each other; connections share a link, each up to the rate of the other end.

    If ranks are ``folded``, only the first of them and their hosts exist, and represent the rest.
    """

    def __init__(self, cluster: Cluster, folded: int = 0) -> None:
        self.folded = folded
        self.cluster = cluster
        self.routes = RouteTable()
        self._laid_out: dict[CollectiveKey, tuple[Messages, Messages, Messages]] = {}
        self._laid_out_bytes = 0
        self._ranks = folded or cluster.world_size
        self._host_of = np.array(cluster.host_of_rank)
        self._hosts = int(self._host_of[self._ranks - 1]) + 1
        self._up_gbps = np.array([host.up_gbps for host in cluster.hosts])
        self._down_gbps = np.array([host.down_gbps for host in cluster.hosts])
        self._servers = [(host.up_gbps, host.down_gbps) for host in cluster.server_hosts]
        self._most_gbps = float(
            max(self._up_gbps.max(), self._down_gbps.max(), *map(max, self._servers), 0.0)
        )
        self._ways = Ways(cluster)

    @property
    def world_size(self) -> int:
        """The number of ranks, including folded ones."""
        return self.cluster.world_size

    def played(self, members: Sequence[int]) -> int:
        """The number of ``members`` (a group of ranks) that are simulated; the rest repeats what they do."""
        count = sum(rank < self._ranks for rank in members)
        assert all(rank < self._ranks for rank in members[:count]), "members that are played come first"
        return count

    @property
    def columns(self) -> Resources:
        """The resources in order: links of hosts (up and down in turn), local sends of ranks, cores of ranks, and the
        links of hosts without workers.
        """
        of_servers = 2 * self._hosts + 2 * self._ranks
        count = of_servers + 2 * len(self._servers)
        burst_ns, window_ns = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        room = np.full(count, WHOLE, dtype=np.int64)
        for way, gbps in enumerate((self._up_gbps[: self._hosts], self._down_gbps[: self._hosts])):
            burst_ns[way : 2 * self._hosts : 2] = np.rint(self.cluster.burst_bytes * 8 / gbps)
            window_ns[way : 2 * self._hosts : 2] = np.rint(self.cluster.window_bytes * 8 / gbps)
            room[way : 2 * self._hosts : 2] = np.maximum(1, np.rint(gbps / self._most_gbps * WHOLE))
        for place, rate in enumerate((rate for both in self._servers for rate in both), of_servers):
            burst_ns[place] = round(self.cluster.burst_bytes * 8 / rate)
            window_ns[place] = round(self.cluster.window_bytes * 8 / rate)
            room[place] = max(1, round(rate / self._most_gbps * WHOLE))
        return Resources(room, burst_ns, _changes(self.cluster, room), window_ns)

    def builder(self) -> OperationGraphBuilder:
        """An empty graph on these resources, which shares their routes.

        Clears the cache of laid-out collectives if it has become too large.
        """
        if self._laid_out_bytes > MOST_LAID_OUT_BYTES:
            self.routes = RouteTable()
            self._laid_out.clear()
            self._laid_out_bytes = 0
        return OperationGraphBuilder(self.columns, self.routes)

    def laid_out(
        self,
        program_of: ProgramOf,
        size_bytes: int,
        cost: AlgorithmCost,
        connection: int,
        members: tuple[int, ...] = (),
    ) -> tuple[Messages, Messages, Messages]:
        """The initial costs of a collective on every rank, its messages, and the work of their receivers.

        The collective spans all ranks, or ``members`` in their order; only simulated members are laid out. The result is
        cached, because most buckets recur in every step and in the next plan.
        """
        key = (program_of, size_bytes, cost, connection, members)
        if key not in self._laid_out:
            ranks = np.array(members[: self.played(members)] or range(self._ranks))
            count = len(members) or self.world_size
            columns = columns_of(program_of, count, len(ranks) if len(ranks) < count else 0)
            cost = cost.at(size_bytes * columns.message_share)
            sizes_bytes = message_bytes(columns, size_bytes, cost.byte_factor)
            work_us = self._work_us(cost)
            requests = (
                self._on_cores(cost.overhead_us, ranks, ()),
                self.messages(columns, sizes_bytes, cost, connection, members),
                self._on_cores(work_us, ranks, (len(sizes_bytes),)),
            )
            pairs, _ = columns.pairs
            self._laid_out_bytes += len(pairs) * ROUTE_BYTES
            self._laid_out_bytes += sum(
                request.duration_ns.nbytes + request.route.nbytes for request in requests
            )
            self._laid_out[key] = requests
        return self._laid_out[key]

    def _work_us(self, cost: AlgorithmCost) -> float:
        return min(cost.message_us, cost.message_cpu_us * self.cluster.crowding)

    def _on_cores(self, work_us: float, ranks: Ints, steps: tuple[int, ...]) -> Messages:
        """The work of ``ranks`` on their cores in every step, of shape (*steps, ranks)."""
        work_ns = round(work_us * 1e3)
        first_core = 2 * self._hosts + self._ranks
        routes = [
            self.routes.number(first_core + rank if work_ns else NO_RESOURCE, NO_RESOURCE)
            for rank in ranks.tolist()
        ]
        shape = (*steps, len(ranks))
        return Messages(np.full(shape, work_ns, np.int64), np.broadcast_to(np.array(routes, np.int32), shape))

    def messages(
        self,
        columns: ProgramColumns,
        size_bytes: Ints,
        cost: AlgorithmCost,
        connection: int = 0,
        members: tuple[int, ...] = (),
    ) -> Messages:
        """The messages of every step and rank, of ``size_bytes`` (steps, ranks); each ends when the receiver has it.

        ``connection`` numbers the connections of a sender. Empty messages take the latency but no link. The message time
        of ``cost`` beyond CPU work adds to the latency, so messages that arrive together spend it concurrently.
        """
        pairs, pair_of = columns.pairs
        pairs = np.array(members, dtype=np.int32)[pairs] if members else pairs
        later_us = cost.message_us - self._work_us(cost)
        routes = [
            self._routes_between(sender, receiver, connection, later_us)
            for sender, receiver in pairs.tolist()
        ]
        table = np.array(routes, dtype=np.int32).reshape(len(routes), 2)
        source, target = self._host_of[pairs[:, 0]], self._host_of[pairs[:, 1]]
        between_gbps = np.minimum(self._up_gbps[source], self._down_gbps[target])
        for (source_host, target_host), path in self._ways.paths.items():
            if path.gbps is not None:
                here = (source == source_host) & (target == target_host)
                between_gbps[here] = np.minimum(between_gbps[here], path.gbps)
        rate_gbps = np.where(source == target, self.cluster.local_gbps, between_gbps)
        duration_ns = np.rint(size_bytes * 8 / rate_gbps[pair_of])
        if duration_ns.size and duration_ns.max() >= LATEST_NS:
            raise OverflowError("the duration of a message exceeds the range of the clock")
        return Messages(duration_ns.astype(np.int64), table[pair_of, (size_bytes > 0).astype(np.int8)])

    def nccl(
        self, kind: str, size_bytes: int, cost: AlgorithmCost, connection: int, members: tuple[int, ...] = ()
    ) -> tuple[list[int], int]:
        """The routes that an NCCL collective occupies, and its duration (ns) by NCCL's own model.

        Between hosts, it occupies each link at the rate of a ring for its whole duration. Inside a host, it occupies the
        local sends of its ranks. Raises OverflowError if the duration exceeds the range of the clock.
        """
        ranks = np.array(members or range(self.world_size))
        hosts, workers = np.unique(self._host_of[ranks], return_counts=True)
        if len(ranks) == 1:
            return [], round(cost.overhead_us * 1e3)
        a_host = int(workers.max())
        fabric = fabric_of(self.cluster, hosts.tolist(), a_host)
        taken = choose(
            cast("Kind", kind), size_bytes * cost.byte_factor, a_host * len(hosts), len(hosts), fabric
        )
        duration_ns = round((taken.time_us + cost.overhead_us) * 1e3)
        if duration_ns >= LATEST_NS:
            raise OverflowError("the duration of a collective exceeds the range of the clock")
        if len(hosts) == 1:
            local = 2 * self._hosts
            local_ranks = [rank for rank in ranks.tolist() if rank < self._ranks]
            return [
                self.routes.number(local + rank, NO_RESOURCE, queue=connection) for rank in local_ranks
            ], duration_ns
        share = (len(ranks) - 1) / len(ranks) * (2 if kind == ALL_REDUCE else 1)
        wire_gbps = size_bytes * cost.byte_factor * share * 8 / max(duration_ns, 1)
        # A ring through all GPUs of a host also occupies the GPUs' own links.
        link_gbps = min(self._up_gbps[hosts].min(), self._down_gbps[hosts].min())
        of_links = wire_gbps / (8 * fabric.passing_gb_s) * a_host / self.cluster.hosts[hosts[0]].workers
        demand = min(1.0, max(wire_gbps, of_links * link_gbps, 1e-6) / self._most_gbps)
        following = [*hosts.tolist()[1:], int(hosts[0])]
        routes = [
            self.routes.number(2 * here, 2 * (there % self._hosts) + 1, queue=connection, demand=demand)
            for here, there in zip(hosts.tolist(), following, strict=True)
            if here < self._hosts
        ]
        return routes, duration_ns

    def message(self, sender: int, receiver: int, size_bytes: int, connection: int = 0) -> tuple[int, int]:
        """The duration (ns, at full rate) and the route of a single message between two ranks.

        It takes the latency and rate of the path between them, and no CPU time. Raises OverflowError if the duration
        exceeds the range of the clock.
        """
        source, target = int(self._host_of[sender]), int(self._host_of[receiver])
        duration_ns = round(size_bytes * 8 / self._ways.gbps(source, target))
        if duration_ns >= LATEST_NS:
            raise OverflowError("the duration of a message exceeds the range of the clock")
        return duration_ns, self._routes_between(sender, receiver, connection, 0.0)[size_bytes > 0]

    @property
    def ranks_by_host(self) -> dict[int, list[int]]:
        """The ranks of each host with workers, by host number."""
        by_host: dict[int, list[int]] = defaultdict(list)
        for rank, host in enumerate(self._host_of.tolist()):
            by_host[host].append(rank)
        return dict(by_host)

    def server_number(self, index: int) -> int:
        """The number of a host without workers, for ``link``; they follow the hosts with workers."""
        return len(self._up_gbps) + index

    def link(
        self, machine: int, way: int, size_bytes: int, cost: AlgorithmCost, stage: int
    ) -> tuple[int, int]:
        """The duration (ns) and route of a transfer that a host sends (``way`` 0) or receives (``way`` 1).

        Transfers of one ``stage`` and direction follow each other. Raises OverflowError if the duration exceeds the range
        of the clock.
        """
        server = machine - len(self._up_gbps)
        if server < 0:
            side, gbps = 2 * machine + way, float((self._down_gbps if way else self._up_gbps)[machine])
        else:
            side = 2 * (self._hosts + self._ranks + server) + way
            gbps = self._servers[server][way]
        duration_ns = round(size_bytes * 8 / gbps)
        if duration_ns >= LATEST_NS:
            raise OverflowError("the duration of a message exceeds the range of the clock")
        # Negative numbers, because connections of ranks are numbered from 0 up.
        queue = 0 if self.cluster.sharing == "queued" else -1 - stage
        latency_ns = round((self.cluster.latency_us + cost.at(size_bytes).message_us) * 1e3)
        demand = gbps / self._most_gbps
        return duration_ns, self.routes.number(
            side, NO_RESOURCE, queue=queue, latency_ns=latency_ns, demand=demand
        )

    def within(self, kind: str, size_bytes: int, ranks: Sequence[int], connection: int) -> tuple[int, int]:
        """The duration (ns) and route of a half of an all-reduce among ``ranks`` of one host.

        The first rank represents the others.
        """
        if self.cluster.nccl is not None:
            routes, duration_ns = self.nccl(kind, size_bytes, AlgorithmCost(), connection, tuple(ranks))
            return duration_ns, routes[0]
        rounds = len(ranks) - 1
        duration_ns = round(rounds * size_bytes / len(ranks) * 8 / self.cluster.local_gbps)
        latency_ns = round(rounds * self.cluster.local_latency_us * 1e3)
        local = 2 * self._hosts + ranks[0]
        return duration_ns, self.routes.number(local, NO_RESOURCE, queue=connection, latency_ns=latency_ns)

    def _routes_between(
        self, sender: int, receiver: int, connection: int, later_us: float
    ) -> tuple[int, int]:
        """The routes of an empty message and of a non-empty one."""
        cluster, hosts = self.cluster, self._hosts
        source, target = int(self._host_of[sender]), int(self._host_of[receiver])
        local = source == target
        latency_ns = round((self._ways.latency_us(source, target) + later_us) * 1e3)
        queue = (
            0
            if cluster.sharing == "queued"
            else (connection * self._ranks + sender) * cluster.world_size + receiver
        )
        empty = self.routes.number(NO_RESOURCE, NO_RESOURCE, latency_ns=latency_ns)
        if local:
            return empty, self.routes.number(
                2 * hosts + sender, NO_RESOURCE, queue=queue, latency_ns=latency_ns
            )
        rate_gbps = self._ways.gbps(source, target)
        return empty, self.routes.number(
            2 * source,
            2 * (target % hosts) + 1,
            queue=queue,
            latency_ns=latency_ns,
            demand=rate_gbps / self._most_gbps,
        )


def _changes(cluster: Cluster, room: Ints) -> Ints:
    """When there is more or less of a link because of others' traffic (``Resources.changes``)."""
    places = {host.name: index for index, host in enumerate(cluster.hosts)}
    on_side: dict[int, list[Traffic]] = defaultdict(list)
    for flow in cluster.traffic:
        on_side[2 * places[flow.source]].append(flow)
        on_side[2 * places[flow.target] + 1].append(flow)
    rows = []
    for side, traffic in on_side.items():
        host = cluster.hosts[side // 2]
        gbps = host.down_gbps if side % 2 else host.up_gbps
        for moment_ms in sorted(
            {m for flow in traffic for m in (flow.start_ms, flow.end_ms) if m is not None}
        ):
            in_flight = [
                t for t in traffic if t.start_ms <= moment_ms and (t.end_ms is None or moment_ms < t.end_ms)
            ]
            taken = sum(t.gbps for t in in_flight) / gbps
            spare = max(0.0, 1 - taken)
            left = max(spare, 1 / (1 + sum(t.connections for t in in_flight)))
            full_room = int(room[side])
            rows.append(
                (round(moment_ms * 1e6), side, max(1, round(left * full_room)), round(spare * full_room))
            )
    return np.array(sorted(rows), dtype=np.int64).reshape(-1, 4)
