"""Collectives in a dataflow graph: chunk programs expanded into transfers on links."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headway.cluster import AlgorithmCost, Cluster
from headway.collectives.program import ChunkProgram, chunk_bounds
from headway.graph.dataflow import NO_RESOURCE, DataflowBuilder

ProgramOf = Callable[[int, int], ChunkProgram]


class Links:
    """The resources of a cluster: two a host for its link, one each direction, and one a rank for local sends.

    A local rate is that of one rank sending beside all the others, as it is fitted and probed; so what queues for
    it are one rank's sends.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._host_of = cluster.host_of_rank

    @property
    def resources(self) -> int:
        """How many resources the links of the cluster are."""
        return 2 * len(self._cluster.hosts) + self._cluster.world_size

    def transfer(
        self, builder: DataflowBuilder, sender: int, receiver: int, size_bytes: int, after: list[int]
    ) -> int:
        """Add the transfer of one message between two ranks; it ends when the receiver has it."""
        cluster = self._cluster
        source, target = self._host_of[sender], self._host_of[receiver]
        if source == target:
            duration_ns = round(size_bytes * 8 / cluster.local_gbps)
            return builder.operation(
                duration_ns,
                after=after,
                latency_ns=round(cluster.local_latency_us * 1e3),
                sender=2 * len(cluster.hosts) + sender if size_bytes else NO_RESOURCE,
            )
        rate_gbps = min(cluster.hosts[source].up_gbps, cluster.hosts[target].down_gbps)
        return builder.operation(
            round(size_bytes * 8 / rate_gbps),
            after=after,
            latency_ns=round(cluster.latency_us * 1e3),
            sender=2 * source if size_bytes else NO_RESOURCE,
            receiver=2 * target + 1 if size_bytes else NO_RESOURCE,
        )


def expand(
    builder: DataflowBuilder,
    links: Links,
    program_of: ProgramOf,
    size_bytes: int,
    begins: Sequence[int],
    ends: Sequence[int],
    cost: AlgorithmCost = AlgorithmCost(),  # noqa: B008 - an immutable value
) -> None:
    """Put a collective of ``size_bytes`` between its members' ``begins`` and ``ends`` (operations, one a rank).

    A message leaves when its sender has finished the round before and its receiver has come to the round, as
    Gloo's and NCCL's rendezvous have it. A rank ends when its last message has been received and sent.
    """
    world_size = len(begins)
    programs = [program_of(rank, world_size) for rank in range(world_size)]
    ready = [builder.operation(round(cost.overhead_us * 1e3), after=[begin]) for begin in begins]
    bounds = chunk_bounds(round(size_bytes * cost.byte_factor), programs[0].chunks)
    for number in range(len(programs[0].rounds)):
        arrivals: dict[int, int] = {}
        for rank, program in enumerate(programs):
            step = program.rounds[number]
            start, end = bounds[step.send_chunk]
            arrivals[step.send_to] = links.transfer(
                builder, rank, step.send_to, end - start, [ready[rank], ready[step.send_to]]
            )
        sent = {rank: arrivals[program.rounds[number].send_to] for rank, program in enumerate(programs)}
        ready = [builder.operation(after=[arrivals[rank], sent[rank]]) for rank in range(world_size)]
    for operation, end in zip(ready, ends, strict=True):
        builder.edge(operation, end)
