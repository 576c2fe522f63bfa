"""Simulates the all-reduce through servers on hosts with and without workers, like BytePS (Jiang et al., OSDI 2020).

The workers of a host reduce first, over the host's own links. Then ``n`` hosts with workers push to each other and to
``k`` hosts without workers, which have more link capacity left and serve more: ``2 (n - 1) / d`` of a tensor each, and
hosts with workers ``(n - k) / d``, where ``d = n^2 + k n - 2 k``. Every link then carries the same, and a tensor takes
``2 n (n - 1) / d`` times the link time of one tensor: the same as a ring for ``k = 0``, and once for ``k = n``.

A tensor is split into pieces: while the sum of one piece is pulled, the next is pushed. Each link carries what its
machine sends and receives of a piece, at its rate. Pushes of all tensors follow each other, and so do pulls. This is
only for predictions; no live program does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from headway.cluster import AlgorithmCost
from headway.collectives.algorithms import ALL_GATHER, REDUCE_SCATTER
from headway.collectives.resources import ClusterResources
from headway.simulation.building import OperationGraphBuilder

PIECE_BYTES = 4_096_000
"""The size of a piece: the default partition size of BytePS."""
PIECES_AHEAD = 2
"""The workers of a host reduce a piece once all hosts pushed the piece this many before it."""


def served_shares(hosts: int, servers: int) -> tuple[float, float]:
    """The shares of a tensor that a host with workers serves, and that a host without serves (0 without such hosts).

    With at least as many server hosts as ``hosts``, the server hosts share everything evenly.
    """
    if servers >= hosts > 1:
        return 0.0, 1.0 / servers
    of_all = hosts**2 + servers * hosts - 2 * servers
    return (hosts - servers) / of_all, 2 * (hosts - 1) / of_all if servers else 0.0


def pieces_of(size_bytes: int) -> int:
    """The number of pieces of a tensor."""
    return max(1, -(-size_bytes // PIECE_BYTES))


@dataclass(slots=True)
class _Machine:
    """A host with or without workers: its resource number, its ranks, and its traffic per byte of a tensor.

    It sends ``pushes`` and receives ``serves`` while all push, and the reverse while all pull.
    """

    number: int
    ranks: list[int]
    pushes: float
    serves: float
    added_up: int = -1  # operation after which its workers have reduced the last piece
    received: int = -1  # operation after which all its workers received the last piece


def expand_served(
    builder: OperationGraphBuilder,
    resources: ClusterResources,
    size_bytes: int,
    begins: Sequence[int],
    ends: Sequence[int],
    cost: AlgorithmCost,
    connection: int,
    servers: int,
) -> int:
    """Add this all-reduce of all ranks between their ``begins`` and ``ends``; returns its first operation.

    The cluster of ``resources`` has at least ``servers`` hosts without workers.
    """
    assert not resources.folded, "hosts with and without workers are not alike"
    assert len(resources.cluster.server_hosts) >= servers
    hosts = resources.ranks_by_host
    share, served = served_shares(len(hosts), servers)
    machines = [
        _Machine(number, ranks, 1 - share, share * (len(hosts) - 1)) for number, ranks in hosts.items()
    ]
    first = builder.operation()
    for machine in machines:
        machine.added_up = machine.received = builder.operation(
            round(cost.overhead_us * 1e3), after=[first, *(begins[rank] for rank in machine.ranks)]
        )
    with_workers = tuple(machines)
    if len(hosts) > 1:
        machines += [
            _Machine(resources.server_number(server), [], 0.0, served * len(hosts))
            for server in range(servers)
        ]
    pieces = pieces_of(size_bytes)
    bounds = np.linspace(0, size_bytes * cost.byte_factor, pieces + 1).round().astype(int).tolist()
    summed: list[int] = []  # by piece
    for before, until in pairwise(bounds):
        piece_bytes = until - before
        for machine in with_workers:
            after = [machine.added_up, *summed[-PIECES_AHEAD:][: len(summed) >= PIECES_AHEAD]]
            machine.added_up = _inside(
                builder, resources, machine, REDUCE_SCATTER, piece_bytes, connection, after
            )
        moved = builder.operation(after=[machine.added_up for machine in with_workers])
        for stage in range(2) if len(machines) > 1 else ():  # all push, then all pull
            parts = []
            for machine in machines:
                sent = (machine.pushes, machine.serves)
                for way in range(2):  # from the machine, and to it
                    bytes_ = round(sent[stage ^ way] * piece_bytes)
                    if bytes_:
                        route = resources.link(machine.number, way, bytes_, cost, stage)
                        parts.append(builder.routed(*route, [moved]))
            moved = builder.operation(after=parts)
            if not stage:
                summed.append(moved)
        for machine in with_workers:
            after = [machine.received, moved]
            machine.received = _inside(
                builder, resources, machine, ALL_GATHER, piece_bytes, connection, after
            )
    for machine in with_workers:
        for rank in machine.ranks:
            builder.edge(machine.received, ends[rank])
    return first


def _inside(
    builder: OperationGraphBuilder,
    resources: ClusterResources,
    machine: _Machine,
    kind: str,
    size_bytes: int,
    connection: int,
    after: Sequence[int],
) -> int:
    """Add the collective among the workers of a host for one piece; returns the operation after it."""
    if len(machine.ranks) == 1:
        return builder.operation(after=after)
    return builder.routed(*resources.within(kind, size_bytes, machine.ranks, connection), after)
