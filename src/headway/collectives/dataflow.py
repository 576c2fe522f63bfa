"""Collectives in a dataflow graph: chunk programs expanded into transfers on links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.cluster import AlgorithmCost, Cluster
from headway.collectives.columns import (
    OUTSIDE,
    ProgramColumns,
    Structure,
    columns_of,
    message_bytes,
    structure_of,
)
from headway.collectives.program import ProgramOf
from headway.graph.dataflow import (
    DURATION,
    LATEST_NS,
    NO_RESOURCE,
    NONE,
    ROUTE,
    SPILL,
    SUCCESSORS,
    WAITS,
    Dataflow,
    DataflowBuilder,
    Ints,
    Numbers,
)  # fmt: skip

__all__ = ["Links", "ProgramOf", "alone", "expand"]


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """Messages as columns of one shape: how long they take, and their routes."""

    duration_ns: Ints
    route: Numbers


class Links:
    """The resources of a cluster: two a host for its link, one each direction, and two a rank: local sends, overhead.

    A local rate is that of one rank sending beside all the others, as it is fitted and probed; so what queues for
    it are one rank's sends. The overheads of a rank's collectives queue for each other, since they are work of its
    cores. Messages of a rank on one connection follow each other; connections share a link evenly.

    Where ranks are ``folded``, only the first of them and their hosts are there, and stand for their like.
    """

    def __init__(self, cluster: Cluster, folded: int = 0) -> None:
        self.folded = folded
        self._cluster = cluster
        self._ranks = folded or cluster.world_size
        self._host_of = np.array(cluster.host_of_rank)
        self._hosts = int(self._host_of[self._ranks - 1]) + 1
        self._up_gbps = np.array([host.up_gbps for host in cluster.hosts])
        self._down_gbps = np.array([host.down_gbps for host in cluster.hosts])

    @property
    def world_size(self) -> int:
        """How many ranks there are, folded or not."""
        return self._cluster.world_size

    @property
    def resources(self) -> int:
        """How many resources the links of the cluster are."""
        return 2 * self._hosts + 2 * self._ranks

    def overheads(self, builder: DataflowBuilder, cost: AlgorithmCost) -> Messages:
        """What a collective costs every rank before its first message."""
        overhead_ns = round(cost.overhead_us * 1e3)
        own = 2 * self._hosts + self._ranks
        routes = [
            builder.route(own + rank if overhead_ns else NO_RESOURCE, NO_RESOURCE)
            for rank in range(self._ranks)
        ]
        return Messages(np.full(self._ranks, overhead_ns, np.int64), np.array(routes, dtype=np.int32))

    def messages(
        self, builder: DataflowBuilder, columns: ProgramColumns, size_bytes: Ints, connection: int = 0
    ) -> Messages:
        """The messages of every step and rank, of ``size_bytes`` (steps, ranks); each ends when the receiver has it.

        ``connection`` numbers the connections of a sender. What is empty takes a latency and no link.
        """
        pairs, pair_of = columns.pairs
        routes = [self._routes(builder, sender, receiver, connection) for sender, receiver in pairs.tolist()]
        table = np.array(routes, dtype=np.int32).reshape(len(routes), 2)
        source, target = self._host_of[pairs[:, 0]], self._host_of[pairs[:, 1]]
        between_gbps = np.minimum(self._up_gbps[source], self._down_gbps[target])
        rate_gbps = np.where(source == target, self._cluster.local_gbps, between_gbps)
        duration_ns = np.rint(size_bytes * 8 / rate_gbps[pair_of])
        if duration_ns.size and duration_ns.max() >= LATEST_NS:
            raise OverflowError("a message takes longer than can be counted")
        return Messages(duration_ns.astype(np.int64), table[pair_of, (size_bytes > 0).astype(np.int8)])

    def _routes(
        self, builder: DataflowBuilder, sender: int, receiver: int, connection: int
    ) -> tuple[int, int]:
        """The routes of an empty message and of another one."""
        cluster, hosts = self._cluster, self._hosts
        source, target = int(self._host_of[sender]), int(self._host_of[receiver])
        local = source == target
        latency_ns = round((cluster.local_latency_us if local else cluster.latency_us) * 1e3)
        queue = connection * self._ranks + sender
        ends = (2 * hosts + sender, NO_RESOURCE) if local else (2 * source, 2 * (target % hosts) + 1)
        return (
            builder.route(NO_RESOURCE, NO_RESOURCE, latency_ns=latency_ns),
            builder.route(*ends, queue=queue, latency_ns=latency_ns),
        )


class CollectiveBlock:
    """All operations of one collective, placed between its members' begins and ends."""

    def __init__(
        self, structure: Structure, overheads: Messages, messages: Messages, ends: Sequence[int]
    ) -> None:
        self._structure = structure
        self._overheads = overheads
        self._messages = messages
        self._ends = np.array(ends, dtype=np.int64)

    @property
    def operations(self) -> int:
        """How many operations."""
        return self._structure.operations

    @property
    def spills(self) -> int:
        """How much room its successors need beside the rows."""
        return len(self._structure.edges.spilled)

    def fill(self, into: Dataflow, base: int, spill: int) -> None:
        """Write the rows (``graph.dataflow.Block``)."""
        structure, edges = self._structure, self._structure.edges
        own = slice(base, base + self.operations)
        begins, transfers, _ = structure.places(base)
        for messages, rows in ((self._overheads, begins), (self._messages, transfers)):
            into.wide[rows, DURATION] = messages.duration_ns.T.ravel()
            into.narrow[rows, ROUTE] = messages.route.T.ravel()
        into.narrow[own, WAITS] = structure.waits
        slots = np.where(edges.slots >= 0, edges.slots + base, edges.slots)
        outside = self._ends[OUTSIDE - slots.ravel()[structure.outside]]
        slots.ravel()[structure.outside] = outside
        into.narrow[own, SUCCESSORS:] = slots
        into.narrow[own, SPILL] = np.where(edges.spill >= 0, edges.spill + spill, NONE)
        spilled = into.spilled[spill : spill + self.spills]
        spilled[:] = edges.spilled
        spilled[edges.targets] += base
        np.add.at(into.narrow[:, WAITS], outside, 1)


def expand(
    builder: DataflowBuilder,
    links: Links,
    program_of: ProgramOf,
    size_bytes: int,
    begins: Sequence[int],
    ends: Sequence[int],
    cost: AlgorithmCost = AlgorithmCost(),  # noqa: B008 - an immutable value
    connection: int = 0,
) -> int:
    """Put a collective of ``size_bytes`` between its members' ``begins`` and ``ends`` (operations, one a rank).

    Collectives under way together on one ``connection`` send their messages one after the other. Who waits for whom
    is said by ``columns.structure_of``. An empty piece, as of a barrier, takes the latency of a message and no link.
    Returns the number of its first operation.
    """
    world_size, folded = links.world_size, links.folded
    assert len(begins) == len(ends) == (folded or world_size)
    columns = columns_of(program_of, world_size, folded)
    sizes_bytes = message_bytes(columns, size_bytes, cost.byte_factor)
    messages = links.messages(builder, columns, sizes_bytes, connection)
    overheads = links.overheads(builder, cost)
    block = CollectiveBlock(structure_of(program_of, world_size, folded), overheads, messages, ends)
    base = builder.block(block)
    for rank, begin in enumerate(begins):
        builder.edge(begin, base + rank)
    return base


def alone(
    cluster: Cluster,
    program_of: ProgramOf,
    size_bytes: int,
    cost: AlgorithmCost = AlgorithmCost(),  # noqa: B008 - an immutable value
) -> Dataflow:
    """One collective with nothing else under way."""
    links = Links(cluster)
    builder = DataflowBuilder(links.resources)
    begins = [builder.operation() for _ in range(cluster.world_size)]
    ends = [builder.operation() for _ in range(cluster.world_size)]
    expand(builder, links, program_of, size_bytes, begins, ends, cost)
    return builder.close()
