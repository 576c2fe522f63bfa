"""The links and cores of a cluster as resources of a dataflow graph, and what uses them."""

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
ROUTE_BYTES = 400  # of two routes in their table
CollectiveKey = tuple[ProgramOf, int, AlgorithmCost, int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """Messages as columns of one shape: how long they take, and their routes."""

    duration_ns: Ints
    route: Numbers


class ClusterResources:
    """The resources of a cluster: two a host for its link, one each direction, and two a rank: local sends, its cores.

    Rates inside a host are measured per sender under full contention, so every rank has its own resource for local
    sends. What its collectives and messages cost a rank queues for its cores. Messages of a rank to
    another on one connection follow each other; connections share a link, each up to the rate of the other end.

    Where ranks are ``folded``, only the first of them and their hosts are there, and stand for their like.
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
        """How many ranks there are, folded or not."""
        return self.cluster.world_size

    def played(self, members: Sequence[int]) -> int:
        """How many of ``members``, a group of ranks, are played; others follow these, and repeat what they do."""
        count = sum(rank < self._ranks for rank in members)
        assert all(rank < self._ranks for rank in members[:count]), "members that are played come first"
        return count

    @property
    def columns(self) -> Resources:
        """The directions of the hosts' links (up and down in turn), then every rank's local sends and its cores.

        Behind them are the links of hosts without workers.
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
        """An empty graph on these resources, whose routes are theirs.

        Where what graphs before it laid out has become too much, it is all forgotten.
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
        """What a collective costs every rank before its first message, its messages, and their work for receivers.

        It is one of all ranks, or of ``members``, in their order, of which those are laid out that are played. Most
        buckets come again, in every step and in the next plan too: a plan that changes one of them has that one laid
        out.
        """
        key = (program_of, size_bytes, cost, connection, members)
        if key not in self._laid_out:
            ranks = np.array(members[: self.played(members)] or range(self._ranks))
            count = len(members) or self.world_size
            columns = columns_of(program_of, count, len(ranks) if len(ranks) < count else 0)
            cost = cost.at(size_bytes * columns.message_share)
            sizes_bytes = message_bytes(columns, size_bytes, cost.byte_factor)
            work_us = self._work_us(cost)
            made = (
                self._on_cores(cost.overhead_us, ranks, ()),
                self.messages(columns, sizes_bytes, cost, connection, members),
                self._on_cores(work_us, ranks, (len(sizes_bytes),)),
            )
            pairs, _ = columns.pairs
            self._laid_out_bytes += len(pairs) * ROUTE_BYTES
            self._laid_out_bytes += sum(each.duration_ns.nbytes + each.route.nbytes for each in made)
            self._laid_out[key] = made
        return self._laid_out[key]

    def _work_us(self, cost: AlgorithmCost) -> float:
        return min(cost.message_us, cost.message_cpu_us * self.cluster.crowding)

    def _on_cores(self, work_us: float, ranks: Ints, steps: tuple[int, ...]) -> Messages:
        """Work of each of ``ranks`` for its cores, in each of so many steps: of shape (*steps, ranks)."""
        work_ns = round(work_us * 1e3)
        own = 2 * self._hosts + self._ranks
        routes = [
            self.routes.number(own + rank if work_ns else NO_RESOURCE, NO_RESOURCE) for rank in ranks.tolist()
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

        ``connection`` numbers the connections of a sender. What is empty takes a latency and no link. What a message
        takes by ``cost`` besides work comes with its latency: several that arrive together pass that time together.
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
        for (one, other), path in self._ways.paths.items():
            if path.gbps is not None:
                here = (source == one) & (target == other)
                between_gbps[here] = np.minimum(between_gbps[here], path.gbps)
        rate_gbps = np.where(source == target, self.cluster.local_gbps, between_gbps)
        duration_ns = np.rint(size_bytes * 8 / rate_gbps[pair_of])
        if duration_ns.size and duration_ns.max() >= LATEST_NS:
            raise OverflowError("a message takes longer than can be counted")
        return Messages(duration_ns.astype(np.int64), table[pair_of, (size_bytes > 0).astype(np.int8)])

    def nccl(
        self, kind: str, size_bytes: int, cost: AlgorithmCost, connection: int, members: tuple[int, ...] = ()
    ) -> tuple[list[int], int]:
        """How long NCCL's own model has a collective take (ns), and what it uses meanwhile, as routes.

        Between hosts it takes of each link what a ring over them sends, all the time. Inside a host it takes its ranks'
        local sends. Raises OverflowError where it takes longer than can be counted.
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
            raise OverflowError("a collective takes longer than can be counted")
        if len(hosts) == 1:
            local = 2 * self._hosts
            own = [rank for rank in ranks.tolist() if rank < self._ranks]
            return [
                self.routes.number(local + rank, NO_RESOURCE, queue=connection) for rank in own
            ], duration_ns
        share = (len(ranks) - 1) / len(ranks) * (2 if kind == ALL_REDUCE else 1)
        wire_gbps = size_bytes * cost.byte_factor * share * 8 / max(duration_ns, 1)
        # A ring through all GPUs of a host leaves no more room to another than their own links have.
        link_gbps = min(self._up_gbps[hosts].min(), self._down_gbps[hosts].min())
        of_links = wire_gbps / (8 * fabric.passing_gb_s) * a_host / self.cluster.hosts[hosts[0]].workers
        asked = min(1.0, max(wire_gbps, of_links * link_gbps, 1e-6) / self._most_gbps)
        following = [*hosts.tolist()[1:], int(hosts[0])]
        routes = [
            self.routes.number(2 * here, 2 * (there % self._hosts) + 1, queue=connection, demand=asked)
            for here, there in zip(hosts.tolist(), following, strict=True)
            if here < self._hosts
        ]
        return routes, duration_ns

    def message(self, sender: int, receiver: int, size_bytes: int, connection: int = 0) -> tuple[int, int]:
        """A message between two ranks by itself: how long it takes (ns) at its full rate, and its route.

        It costs the latency and the rate of what is between the two, and nothing on their cores. Raises OverflowError
        where it takes longer than can be counted.
        """
        source, target = int(self._host_of[sender]), int(self._host_of[receiver])
        duration_ns = round(size_bytes * 8 / self._ways.gbps(source, target))
        if duration_ns >= LATEST_NS:
            raise OverflowError("a message takes longer than can be counted")
        return duration_ns, self._routes_between(sender, receiver, connection, 0.0)[size_bytes > 0]

    @property
    def ranks_by_host(self) -> dict[int, list[int]]:
        """The ranks of each host that has some, by the number of the host."""
        found: dict[int, list[int]] = defaultdict(list)
        for rank, host in enumerate(self._host_of.tolist()):
            found[host].append(rank)
        return dict(found)

    def server_number(self, index: int) -> int:
        """The number of a host without workers for ``link``: behind those of the others."""
        return len(self._up_gbps) + index

    def link(
        self, machine: int, way: int, size_bytes: int, cost: AlgorithmCost, stage: int
    ) -> tuple[int, int]:
        """What a host, with or without workers, sends (``way`` 0) or receives (1): how long it takes (ns), as a route.

        What it sends in a ``stage`` follows what it has sent in it before, and so does what it receives. Raises
        OverflowError where it takes longer than can be counted.
        """
        server = machine - len(self._up_gbps)
        if server < 0:
            side, gbps = 2 * machine + way, float((self._down_gbps if way else self._up_gbps)[machine])
        else:
            side = 2 * (self._hosts + self._ranks + server) + way
            gbps = self._servers[server][way]
        duration_ns = round(size_bytes * 8 / gbps)
        if duration_ns >= LATEST_NS:
            raise OverflowError("a message takes longer than can be counted")
        # Stages are counted from below, as connections of ranks are from 0 up.
        queue = 0 if self.cluster.sharing == "queued" else -1 - stage
        latency_ns = round((self.cluster.latency_us + cost.at(size_bytes).message_us) * 1e3)
        asked = gbps / self._most_gbps
        return duration_ns, self.routes.number(
            side, NO_RESOURCE, queue=queue, latency_ns=latency_ns, demand=asked
        )

    def within(self, kind: str, size_bytes: int, ranks: Sequence[int], connection: int) -> tuple[int, int]:
        """A half of an all-reduce among ``ranks`` of one host: how long it takes (ns), as a route.

        The first of them stands for the others, which do the same.
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
        """The routes of an empty message and of another one."""
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
    for each in cluster.traffic:
        on_side[2 * places[each.source]].append(each)
        on_side[2 * places[each.target] + 1].append(each)
    rows = []
    for side, traffic in on_side.items():
        host = cluster.hosts[side // 2]
        gbps = host.down_gbps if side % 2 else host.up_gbps
        for moment_ms in sorted(
            {m for each in traffic for m in (each.start_ms, each.end_ms) if m is not None}
        ):
            in_flight = [
                t for t in traffic if t.start_ms <= moment_ms and (t.end_ms is None or moment_ms < t.end_ms)
            ]
            taken = sum(t.gbps for t in in_flight) / gbps
            spare = max(0.0, 1 - taken)
            left = max(spare, 1 / (1 + sum(t.connections for t in in_flight)))
            whole = int(room[side])
            rows.append((round(moment_ms * 1e6), side, max(1, round(left * whole)), round(spare * whole)))
    return np.array(sorted(rows), dtype=np.int64).reshape(-1, 4)
