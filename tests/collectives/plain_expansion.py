"""Chunk programs expanded message by message: what the fast expansion is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.cluster import AlgorithmCost, Cluster
from headway.collectives.program import ProgramOf, piece_bounds
from headway.simulation.building import NO_RESOURCE, WHOLE, OperationGraphBuilder, Resources


class ClusterResources:
    """The resources of a cluster: two a host for its link, one each direction, and two a rank: local sends, overhead.

    A local rate is that of one rank sending while all the others do, as it is fitted and probed; so what queues for
    it are one rank's sends. The overheads of a rank's collectives queue for each other, since they are work of its
    cores. Messages of a rank on one connection follow each other; connections share a link evenly.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._host_of = cluster.host_of_rank

    @property
    def columns(self) -> Resources:
        """The links of the cluster, up and down in turn, then local sends, then cores."""
        rates = [gbps for host in self._cluster.hosts for gbps in (host.up_gbps, host.down_gbps)]
        room = [gbps / max(rates) for gbps in rates] + [1.0] * (2 * self._cluster.world_size)
        plain = Resources.plain(len(room))
        whole = np.rint(np.array(room) * WHOLE).astype(np.int64)
        return Resources(whole, plain.burst_ns, plain.changes, plain.window_ns)

    def builder(self) -> OperationGraphBuilder:
        """An empty graph on these resources."""
        return OperationGraphBuilder(self.columns)

    def overhead(self, builder: OperationGraphBuilder, rank: int, cost: AlgorithmCost, after: int) -> int:
        """Add what a collective costs a rank before its first message."""
        overhead_ns = round(cost.overhead_us * 1e3)
        resource = 2 * len(self._cluster.hosts) + self._cluster.world_size + rank
        return builder.operation(overhead_ns, after=[after], sender=resource if overhead_ns else NO_RESOURCE)

    def transfer(
        self,
        builder: OperationGraphBuilder,
        sender: int,
        receiver: int,
        size_bytes: int,
        after: list[int],
        cost: AlgorithmCost,
        connection: int = 0,
    ) -> int:
        """Add the transfer of one message between two ranks; it ends when the receiver has it.

        ``connection`` numbers the connections of ``sender``.
        """
        cluster = self._cluster
        queue = (connection * cluster.world_size + sender) * cluster.world_size + receiver
        source, target = self._host_of[sender], self._host_of[receiver]
        later_us = cost.message_us - self._work_us(cost)
        if source == target:
            duration_ns = round(size_bytes * 8 / cluster.local_gbps)
            return builder.operation(
                duration_ns,
                after=after,
                latency_ns=round((cluster.local_latency_us + later_us) * 1e3),
                sender=2 * len(cluster.hosts) + sender if size_bytes else NO_RESOURCE,
                queue=queue,
            )
        rate_gbps = min(cluster.hosts[source].up_gbps, cluster.hosts[target].down_gbps)
        most_gbps = max(gbps for host in cluster.hosts for gbps in (host.up_gbps, host.down_gbps))
        return builder.operation(
            round(size_bytes * 8 / rate_gbps),
            after=after,
            latency_ns=round((cluster.latency_us + later_us) * 1e3),
            sender=2 * source if size_bytes else NO_RESOURCE,
            receiver=2 * target + 1 if size_bytes else NO_RESOURCE,
            queue=queue,
            demand=rate_gbps / most_gbps,
        )

    @staticmethod
    def _work_us(cost: AlgorithmCost) -> float:
        return min(cost.message_us, cost.message_cpu_us)

    def handle(self, builder: OperationGraphBuilder, rank: int, cost: AlgorithmCost, after: list[int]) -> int:
        """Add what a message costs its receiver."""
        work_us = self._work_us(cost)
        resource = 2 * len(self._cluster.hosts) + self._cluster.world_size + rank
        return builder.operation(
            round(work_us * 1e3),
            after=after,
            sender=resource if work_us else NO_RESOURCE,
        )


def expand(
    builder: OperationGraphBuilder,
    resources: ClusterResources,
    program_of: ProgramOf,
    size_bytes: int,
    begins: Sequence[int],
    ends: Sequence[int],
    cost: AlgorithmCost = AlgorithmCost(),  # noqa: B008 - an immutable value
    connection: int = 0,
) -> None:
    """Put a collective of ``size_bytes`` between its members' ``begins`` and ``ends`` (operations, one a rank).

    Collectives in flight together on one ``connection`` send their messages one after the other.

    Every rule is that of ``collectives.program``: a message leaves when its sender has done the step that delivered
    it and its receiver has posted the receive. A rank ends when its last message has been received and its last
    one to each other rank has arrived. An empty piece, as of a barrier, takes the latency of a message and no link.
    """
    world_size = len(begins)
    programs = [program_of(rank, world_size) for rank in range(world_size)]
    cost = cost.at(size_bytes * programs[0].message_share)
    begun = [resources.overhead(builder, rank, cost, begin) for rank, begin in enumerate(begins)]
    done: list[list[int]] = [[] for _ in begins]  # for each rank, the operation that ends each step
    sent_to: list[dict[int, int]] = [
        {} for _ in begins
    ]  # for each rank, its latest transfer to each other one
    bounds = piece_bounds(round(size_bytes * cost.byte_factor), programs[0].chunks, programs[0].pieces)
    for number in range(len(programs[0].steps)):
        arrivals: dict[int, int] = {}
        for rank, program in enumerate(programs):
            step = program.steps[number]
            start, end = bounds[step.send_piece][0], bounds[step.send_piece + step.run - 1][1]
            receiver, posted_after = step.send_to, number - programs[step.send_to].lookahead
            held = done[rank][step.send_after] if step.send_after >= 0 else begun[rank]
            posted = done[receiver][posted_after] if posted_after >= 0 else begun[receiver]
            arrivals[receiver] = resources.transfer(
                builder, rank, receiver, end - start, [held, posted], cost, connection
            )
            sent_to[rank][receiver] = arrivals[receiver]
        for rank, steps in enumerate(done):
            before = steps[-1] if steps else begun[rank]
            steps.append(resources.handle(builder, rank, cost, [arrivals[rank], before]))
    for steps, start, sent, end in zip(done, begun, sent_to, ends, strict=True):
        builder.edge(steps[-1] if steps else start, end)
        for last in sent.values():
            builder.edge(last, end)
