"""Expands collectives into a graph of operations: chunk programs become transfers on links."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.cluster import AlgorithmCost, Cluster
from headway.collectives.program import OUTSIDE, ProgramOf, Structure, structure_of
from headway.collectives.resources import ClusterResources, Messages
from headway.simulation.building import (
    DURATION,
    NONE,
    ROUTE,
    SPILL,
    SUCCESSORS,
    WAITS,
    OperationGraph,
    OperationGraphBuilder,
)

__all__ = ["alone", "expand"]


class CollectiveBlock:
    """All operations of one collective, placed between its members' begins and ends."""

    def __init__(
        self,
        structure: Structure,
        columns: tuple[Messages, Messages, Messages],
        ends: Sequence[int],
    ) -> None:
        """``columns`` are the initial costs of ranks, the messages, and the work of their receivers."""
        self._structure = structure
        self._columns = columns
        self._ends = np.array(ends, dtype=np.int64)

    @property
    def operations(self) -> int:
        """The number of operations."""
        return self._structure.operations

    @property
    def spills(self) -> int:
        """The number of spilled successors, which do not fit into the rows."""
        return len(self._structure.edges.spilled)

    def fill(self, into: OperationGraph, base: int, spill: int) -> None:
        """Write the rows (``simulation.operations.Block``)."""
        structure, edges = self._structure, self._structure.edges
        block_rows = slice(base, base + self.operations)
        for messages, rows in zip(self._columns, structure.places(base), strict=True):
            into.wide[rows, DURATION] = messages.duration_ns.T.ravel()
            into.narrow[rows, ROUTE] = messages.route.T.ravel()
        into.narrow[block_rows, WAITS] = structure.waits
        slots = np.where(edges.slots >= 0, edges.slots + base, edges.slots)
        outside = self._ends[OUTSIDE - slots.ravel()[structure.outside]]
        slots.ravel()[structure.outside] = outside
        into.narrow[block_rows, SUCCESSORS:] = slots
        into.narrow[block_rows, SPILL] = np.where(edges.spill >= 0, edges.spill + spill, NONE)
        spilled = into.spilled[spill : spill + self.spills]
        spilled[:] = edges.spilled
        spilled[edges.targets] += base
        np.add.at(into.narrow[:, WAITS], outside, 1)


def expand(
    builder: OperationGraphBuilder,
    resources: ClusterResources,
    program_of: ProgramOf,
    size_bytes: int,
    begins: Sequence[int],
    ends: Sequence[int],
    cost: AlgorithmCost = AlgorithmCost(),  # noqa: B008 - an immutable value
    connection: int = 0,
    members: tuple[int, ...] = (),
) -> int:
    """Add a collective of ``size_bytes`` between its members' ``begins`` and ``ends`` (one operation per rank).

    It spans all ranks, or ``members`` (ranks of the cluster, in the order of begins and ends). Of folded ranks, only the
    first are present. Concurrent collectives on one ``connection`` send their messages one after the other.
    ``program.structure_of`` says who waits for whom. An empty piece, as in a barrier, takes the latency of a message but
    no link. Returns the number of its first operation.
    """
    count, here = len(members) or resources.world_size, _played(resources, members)
    assert len(begins) == len(ends) == here
    assert builder.routes is resources.routes, "a graph on other resources"
    structure = structure_of(program_of, count, here if here < count else 0)
    laid_out = resources.laid_out(program_of, size_bytes, cost, connection, members)
    base = builder.block(CollectiveBlock(structure, laid_out, ends))
    for index, begin in enumerate(begins):
        builder.edge(begin, base + index)
    return base


def expand_nccl(
    builder: OperationGraphBuilder,
    resources: ClusterResources,
    kind: str,
    size_bytes: int,
    begins: Sequence[int],
    ends: Sequence[int],
    cost: AlgorithmCost = AlgorithmCost(),  # noqa: B008 - an immutable value
    connection: int = 0,
    members: tuple[int, ...] = (),
) -> int:
    """Add an NCCL collective between its members' ``begins`` and ``ends``, timed by NCCL's own model.

    Its kernels begin when all members have arrived, and end together. Arguments and result as in ``expand``.
    """
    assert len(begins) == len(ends) == _played(resources, members)
    all_there = builder.operation(after=begins)
    routes, duration_ns = resources.nccl(kind, size_bytes, cost, connection, members)
    parts = [builder.routed(duration_ns, route, [all_there]) for route in routes]
    done = builder.operation(after=parts)
    for end in ends:
        builder.edge(done, end)
    return all_there


def _played(resources: ClusterResources, members: tuple[int, ...]) -> int:
    return resources.played(members) if members else resources.folded or resources.world_size


def alone(
    cluster: Cluster,
    program_of: ProgramOf,
    size_bytes: int,
    cost: AlgorithmCost = AlgorithmCost(),  # noqa: B008 - an immutable value
) -> OperationGraph:
    """The graph of one collective with nothing else in flight."""
    return repeated(cluster, program_of, size_bytes, cost, 1)


def repeated(
    cluster: Cluster, program_of: ProgramOf, size_bytes: int, cost: AlgorithmCost, count: int
) -> OperationGraph:
    """The graph of ``count`` collectives back to back on every rank, with nothing else in flight."""
    resources = ClusterResources(cluster)
    builder = resources.builder()
    begins = [builder.operation() for _ in range(cluster.world_size)]
    for _ in range(count):
        ends = [builder.operation() for _ in range(cluster.world_size)]
        expand(builder, resources, program_of, size_bytes, begins, ends, cost)
        begins = ends
    return builder.close()
