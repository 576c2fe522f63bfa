"""Writes a graph in GOAL, the language of LogGOPSim and ATLAHS (Hoefler, Siebert, Lumsdaine, ICPP 2009).

A rank's operations are computations (``calc``, in ns), sends and receives; each may require others of the same rank.
GOAL contains no link costs: each simulator has its own network model.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from headway import files
from headway.collectives.program import columns_of, message_bytes, structure_of
from headway.errors import UserError
from headway.graph.build import GraphBuilder, PlacedCollective
from headway.simulation.building import DURATION, OperationGraph

MAX_OPERATIONS = 5_000_000
LONGEST_NS = 2_000_000_000  # numbers are read into 32 bits
# A processor does one thing at a time, so overlapping work uses different ones: updates by bucket, sends and receives by
# collective, APART of each. The CPU costs of collectives are sequential. GOAL allows 256 processors.
APART = 80
MAIN = 0
COSTS = 1
UPDATES = 2
SENDING = UPDATES + APART
# The processor that receives for a collective is APART after the one that sends.


class GoalWriter:
    """Writes an unfolded graph; ``ranks[operation]`` is the rank of each operation.

    Raises UserError for a graph that is too large, or with transfers or collectives of groups.
    """

    def __init__(self, graph: GraphBuilder[Any], dataflow: OperationGraph) -> None:
        assert graph.ranks == graph.world_size, "a folded graph does not have all ranks"
        if len(graph.collectives) < len(graph.communications) or any(c.group for c in graph.collectives):
            raise UserError(
                "GOAL export supports only collectives of all ranks", got="transfers, or collectives of groups",
                expected="a data-parallel strategy",
            )  # fmt: skip
        if len(dataflow) > MAX_OPERATIONS:
            raise UserError(
                "the graph is too large for GOAL",
                got=f"{len(dataflow)} operations",
                expected=f"at most {MAX_OPERATIONS}",
                fix="Record fewer steps.",
            )
        count = len(dataflow)
        self._dataflow = dataflow
        self._world_size = graph.world_size
        self.ranks = np.full(count, -1, dtype=np.int64)
        self._processor = np.full(count, -1, dtype=np.int64)
        self._to = np.full(count, -1, dtype=np.int64)  # of messages: who receives them
        self._size_bytes = np.zeros(count, dtype=np.int64)
        self._tag = np.zeros(count, dtype=np.int64)
        for span in graph.spans:
            self.ranks[span.operation], self._processor[span.operation] = span.rank, MAIN
        for work in graph.works:
            self.ranks[work.operation] = work.rank
            self._processor[work.operation] = UPDATES + work.bucket % APART
        tag = 0
        for number, collective in enumerate(graph.collectives):
            tag = self._place(graph, collective, tag, SENDING + number % APART)
        assert (self.ranks >= 0).all(), "an operation of no rank"
        assert (self._processor >= 0).all(), "an operation of no processor"

    def _place(self, graph: GraphBuilder[Any], collective: PlacedCollective, tag: int, processor: int) -> int:
        """Assign the operations of a collective to ranks and ``processor``; returns the next free tag."""
        world_size = self._world_size
        ranks = np.arange(world_size)
        self.ranks[collective.begins] = self.ranks[collective.ends] = ranks
        program_of = collective.selection.program_of
        columns = columns_of(program_of, world_size)
        begins, transfers, dones = structure_of(program_of, world_size).places(collective.base)
        steps = len(columns.send_to)
        self.ranks[begins] = ranks
        duration_ns = self._dataflow.duration_ns
        for operations in (collective.begins, collective.ends, transfers):
            self._processor[operations] = processor
        for operations in (begins, dones):
            self._processor[operations] = np.where(duration_ns[operations] > 0, COSTS, processor)
        self.ranks[transfers] = self.ranks[dones] = np.repeat(ranks, steps)
        cost = collective.selection.cost(graph.cluster)
        self._to[transfers] = columns.send_to.T.ravel()
        self._size_bytes[transfers] = message_bytes(
            columns, collective.size_bytes, cost.byte_factor
        ).T.ravel()
        self._tag[transfers] = np.tile(tag + np.arange(steps), world_size)
        return tag + steps

    def write(self, path: Path) -> int:
        """Write the file; returns its number of operations, counting sends and receives separately."""
        written = 0
        with files.file_written_whole(path) as file:
            file.write(f"num_ranks {self._world_size}\n".encode())
            for rank, text, count in self._ranks():
                file.write(f"\nrank {rank} {{\n{text}}}\n".encode())
                written += count
        return written

    def _ranks(self) -> Iterator[tuple[int, str, int]]:
        requires: dict[int, list[tuple[str, str]]] = {rank: [] for rank in range(self._world_size)}
        for before in range(len(self._dataflow)):
            for part, following in pairwise(self._parts(before)):
                requires[int(self.ranks[before])].append((part, following))
            for after in self._dataflow.successors(before):
                rank, edge = self._edge(before, after)
                requires[rank].append(edge)
        rank_operations = [np.flatnonzero(self.ranks == rank) for rank in range(self._world_size)]
        incoming = [np.flatnonzero(self._to == rank) for rank in range(self._world_size)]
        for rank in range(self._world_size):
            lines = [line for number in rank_operations[rank].tolist() for line in self._operation(number)]
            lines += [self._receive(number) for number in incoming[rank].tolist()]
            count = len(lines)
            lines += [f"{after} requires {before}" for before, after in requires.pop(rank)]
            yield rank, "".join(f"{line}\n" for line in lines), count

    def _operation(self, number: int) -> Iterator[str]:
        if self._to[number] >= 0:
            yield (
                f"o{number}: send {self._size_bytes[number]}b to {self._to[number]} tag {self._tag[number]} "
                f"cpu {self._processor[number]}"
            )
            return
        parts, left_ns = divmod(int(self._dataflow.wide[number, DURATION]), LONGEST_NS)
        for part in range(parts):
            yield f"o{number}_{part}: calc {LONGEST_NS} cpu {self._processor[number]}"
        yield f"o{number}: calc {left_ns} cpu {self._processor[number]}"

    def _parts(self, number: int) -> list[str]:
        """The labels of an operation: durations beyond the 32-bit limit are cut into several, the last with the name."""
        parts = int(self._dataflow.wide[number, DURATION]) // LONGEST_NS if self._to[number] < 0 else 0
        return [*(f"o{number}_{part}" for part in range(parts)), f"o{number}"]

    def _receive(self, number: int) -> str:
        return (
            f"r{number}: recv {self._size_bytes[number]}b from {self.ranks[number]} tag {self._tag[number]} "
            f"cpu {self._processor[number] + APART}"
        )

    def _edge(self, before: int, after: int) -> tuple[int, tuple[str, str]]:
        """The rank of an edge and its two labels: a send belongs to the sender, the receive to the receiver."""
        rank = int(self.ranks[after])
        if self._to[after] >= 0 and self.ranks[before] != rank:
            return int(self._to[after]), (f"o{before}", f"r{after}")  # the receive is posted
        if self._to[before] >= 0 and self.ranks[before] != rank:
            return rank, (f"r{before}", self._parts(after)[0])
        return rank, (f"o{before}", self._parts(after)[0])
