"""Builds graphs of operations in flat arrays, one by one or in blocks, also while they are played.

An operation is one cache line of 64 bytes, so that playing it costs one memory access, plus one for each operation that
waits for it. The route that it uses, and successors that do not fit, are stored separately.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headway.arrays import Ints

Numbers = npt.NDArray[np.int32]
NO_RESOURCE = -1
MOST_OPERATIONS = 2**31 - 1
LATEST_NS = 2**60  # a sum of three such times still fits
OPERATION_BYTES = 64

# Columns of ``OperationGraph.wide``.
DURATION, START, END = 0, 1, 2
# Columns of ``OperationGraph.narrow``, behind those.
ROUTE, WAITS, LEFT, FOLLOWING, SPILL, SUCCESSORS = 6, 7, 8, 9, 10, 11
SLOTS = 5  # successors in the line itself
NONE = -1
FREE, DECISION = 0, 1  # the routes of operations without resources, and of decisions
DECIDED = -2  # the queue of decisions
WHOLE = 2**46  # the unit of rates: that of the fastest resource


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """The routes of operations, in columns: the sender's and receiver's side of a link, a queue, and a latency.

    ``demand`` is the rate (in WHOLE) that an operation takes of each side when nothing slows it down.
    """

    sender: Numbers
    receiver: Numbers
    demand: Ints
    queue: Numbers
    latency_ns: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Resources:
    """The resources that operations share.

    ``room`` is the rate of each (in WHOLE). ``burst_ns`` is token-bucket credit: after idling for this long, a resource
    does that much work at once. ``changes`` are rows, sorted by time, of a time (ns), a resource, its rate from then on
    (in WHOLE), and the rate that would be left if other traffic got everything it wants. ``window_ns`` is the work that
    an operation keeps queued on a resource shared with other traffic: that traffic gets its part only once it has queued
    in proportion, so the operation is ahead by that much (0: it gets its part immediately).
    """

    room: Ints
    burst_ns: Ints
    changes: Ints
    window_ns: Ints

    @classmethod
    def plain(cls, count: int) -> Resources:
        """``count`` equal resources without bursts and changes."""
        nothing = np.zeros(count, dtype=np.int64)
        return cls(nothing + WHOLE, nothing, np.zeros((0, 4), dtype=np.int64), nothing)

    def __len__(self) -> int:
        return len(self.burst_ns)


@dataclass(frozen=True, slots=True, eq=False)
class OperationGraph:
    """Operations as rows of two views of the same memory.

    An operation uses up to two resources (a sender's and a receiver's side of a link) for ``duration_ns`` at its full
    rate, and is done ``latency_ns`` after it has left them. Operations of one queue, such as messages of one
    connection, run one after the other. ``wide`` (int64) holds durations; ``narrow`` (int32) holds routes, the number
    of operations to wait for, and successors: in SLOTS columns, padded with NONE, and any further ones at SPILL in
    ``spilled``, preceded by their number. The engine uses the other columns.
    """

    wide: Ints
    narrow: Numbers
    spilled: Numbers
    routes: Routes
    resources: Resources
    queues: int

    def __len__(self) -> int:
        return len(self.wide)

    @property
    def duration_ns(self) -> Ints:
        """The duration of each operation without contention."""
        return self.wide[:, DURATION]

    @property
    def sender(self) -> Numbers:
        """The sender's side that each operation uses, or NO_RESOURCE."""
        return self.routes.sender[self.narrow[:, ROUTE]]

    @property
    def receiver(self) -> Numbers:
        """The receiver's side that each operation uses, or NO_RESOURCE."""
        return self.routes.receiver[self.narrow[:, ROUTE]]

    @property
    def queue(self) -> Numbers:
        """The queue of each operation."""
        return self.routes.queue[self.narrow[:, ROUTE]]

    @property
    def latency_ns(self) -> Ints:
        """The time from leaving the resources until each operation is done."""
        return self.routes.latency_ns[self.narrow[:, ROUTE]]

    @property
    def memory_bytes(self) -> int:
        """The size of the arrays."""
        return self.wide.nbytes + self.spilled.nbytes

    def successors(self, number: int) -> list[int]:
        """The operations that wait for operation ``number``."""
        slots = self.narrow[number, SUCCESSORS : SUCCESSORS + SLOTS]
        spill = int(self.narrow[number, SPILL])
        more = self.spilled[spill + 1 : spill + 1 + self.spilled[spill]].tolist() if spill != NONE else []
        return [*slots[slots != NONE].tolist(), *more]

    def with_durations(self, operations: npt.NDArray[np.intp], duration_ns: Ints) -> OperationGraph:
        """The same graph with other durations of ``operations``."""
        wide, narrow = lines(len(self))
        wide[:] = self.wide
        wide[operations, DURATION] = duration_ns
        return OperationGraph(wide, narrow, self.spilled, self.routes, self.resources, self.queues)


def lines(count: int) -> tuple[Ints, Numbers]:
    """Allocate ``count`` operations, each in its own cache line: the wide view and the narrow one."""
    memory = np.zeros((count + 1) * OPERATION_BYTES, dtype=np.uint8)
    begin = -memory.ctypes.data % OPERATION_BYTES
    aligned = memory[begin : begin + count * OPERATION_BYTES]
    return aligned.view(np.int64).reshape(count, 8), aligned.view(np.int32).reshape(count, 16)


@dataclass(frozen=True, slots=True, eq=False)
class Edges:
    """Successors of operations in the layout of ``OperationGraph``; ``targets`` are the used places of ``spilled``."""

    slots: Numbers
    spill: Numbers
    spilled: Numbers
    targets: npt.NDArray[np.intp]


def edges_of(before: Ints, after: Ints, count: int) -> Edges:
    """The edges ``before[i] -> after[i]`` of ``count`` operations."""
    order = np.argsort(before, kind="stable")
    rows, ends = before[order], after[order]
    degree = np.bincount(rows, minlength=count)
    first = np.cumsum(degree) - degree
    place = np.arange(len(rows)) - first[rows]
    slots = np.full((count, SLOTS), NONE, dtype=np.int32)
    within = place < SLOTS
    slots[rows[within], place[within]] = ends[within]
    spill = np.full(count, NONE, dtype=np.int32)
    large = np.flatnonzero(degree > SLOTS)
    if not len(large):
        return Edges(slots, spill, np.zeros(0, np.int32), np.zeros(0, np.intp))
    more = degree[large] - SLOTS
    begin = np.cumsum(more + 1) - (more + 1)
    spill[large] = begin
    spilled = np.zeros(int(more.sum()) + len(large), dtype=np.int32)
    spilled[begin] = more
    targets = spill[rows[~within]].astype(np.intp) + 1 + place[~within] - SLOTS
    spilled[targets] = ends[~within]
    return Edges(slots, spill, spilled, targets)


class Block(Protocol):
    """Many operations that are added at once, with known edges among themselves and to others."""

    @property
    def operations(self) -> int:
        """The number of operations."""

    @property
    def spills(self) -> int:
        """The room that its successors need in ``OperationGraph.spilled``."""

    def fill(self, into: OperationGraph, base: int, spill: int) -> None:
        """Write rows into ``into`` from operation ``base`` on, and further successors from ``spill`` on.

        Edges to operations outside of the block are added to their WAITS.
        """


class RouteTable:
    """Assigns numbers to routes; several graphs may share a table."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int], int] = {}
        self._routes: dict[tuple[int, ...], int] = {}
        assert self.number(NO_RESOURCE, NO_RESOURCE) == FREE
        self._routes[NO_RESOURCE, NO_RESOURCE, DECIDED, WHOLE, 0] = DECISION

    def number(
        self,
        sender: int,
        receiver: int,
        *,
        queue: int = 0,
        latency_ns: int = 0,
        demand: float = 1.0,
    ) -> int:
        """The number of a route. Queues are numbered per sender's side.

        ``demand`` is the rate that it takes of both sides when nothing slows it down, as a fraction of WHOLE.
        """
        line = NO_RESOURCE
        if sender != NO_RESOURCE or receiver != NO_RESOURCE:
            line = self._queues.setdefault((sender, queue), len(self._queues))
        units = max(1, round(demand * WHOLE))
        return self._routes.setdefault((sender, receiver, line, units, latency_ns), len(self._routes))

    @property
    def queues(self) -> int:
        """How many queues there are."""
        return len(self._queues)

    def __len__(self) -> int:
        return len(self._routes)

    def columns(self) -> Routes:
        """All routes so far."""
        columns = list(zip(*self._routes, strict=True))
        sender, receiver, queue = (np.array(column, dtype=np.int32) for column in columns[:3])
        demand, latency_ns = (np.array(column, dtype=np.int64) for column in columns[3:])
        return Routes(sender, receiver, demand, queue, latency_ns)


@dataclass(frozen=True, slots=True, eq=False)
class Addition:
    """What was added to a builder: ``count`` operations from ``first`` on, and edges.

    ``number``, ``duration_ns`` and ``route`` describe operations that were added one by one, ``edges`` their outgoing
    edges, ``after`` the targets of those. ``earlier`` are edges (before, after) out of earlier operations.
    """

    first: int
    count: int
    number: Ints
    duration_ns: Ints
    route: Numbers
    edges: Edges
    after: Ints
    earlier: Ints
    blocks: tuple[tuple[int, Block], ...]

    @property
    def spills(self) -> int:
        """How much room its successors need in ``OperationGraph.spilled``."""
        return len(self.edges.spilled) + sum(block.spills for _, block in self.blocks)

    def fill(self, into: OperationGraph, spill: int) -> None:
        """Write the operations and their edges, except ``earlier`` ones; further successors from ``spill`` on."""
        edges, narrow = self.edges, into.narrow
        into.wide[self.number, DURATION] = self.duration_ns
        narrow[self.number, ROUTE] = self.route
        narrow[self.number, SUCCESSORS:] = edges.slots
        narrow[self.number, SPILL] = np.where(edges.spill >= 0, edges.spill + spill, NONE)
        into.spilled[spill : spill + len(edges.spilled)] = edges.spilled
        spill += len(edges.spilled)
        for base, block in self.blocks:
            block.fill(into, base, spill)
            spill += block.spills
        np.add.at(narrow[:, WAITS], self.after, 1)


class OperationGraphBuilder:
    """Collects operations and edges, in any order, and closes them into an OperationGraph."""

    def __init__(self, resources: int | Resources = 0, routes: RouteTable | None = None) -> None:
        self.resources = Resources.plain(resources) if isinstance(resources, int) else resources
        self.routes = routes or RouteTable()
        self._number = array("i")  # of operations that were added one by one
        self._duration_ns = array("q")
        self._route = array("i")
        self._before = array("i")
        self._after = array("i")
        self._count = 0
        self._first = 0  # that is not settled
        self._blocks: list[tuple[int, Block]] = []

    def operation(
        self,
        duration_ns: int = 0,
        *,
        after: Iterable[int] = (),
        latency_ns: int = 0,
        sender: int = NO_RESOURCE,
        receiver: int = NO_RESOURCE,
        queue: int = 0,
        demand: float = 1.0,
    ) -> int:
        """Add an operation that waits for those in ``after``; returns its number."""
        plain = sender == NO_RESOURCE and receiver == NO_RESOURCE and not latency_ns
        route = (
            FREE
            if plain
            else self.routes.number(sender, receiver, queue=queue, latency_ns=latency_ns, demand=demand)
        )
        return self.routed(duration_ns, route, after)

    def routed(self, duration_ns: int, route: int, after: Iterable[int] = ()) -> int:
        """Add an operation with ``route``, a number of ``routes``; returns its number."""
        number = self._count
        self._count += 1
        self._number.append(number)
        self._duration_ns.append(duration_ns)
        self._route.append(route)
        for before in after:
            self.edge(before, number)
        return number

    def edge(self, before: int, after: int) -> None:
        """Make ``after`` wait for ``before``, which is not part of a block."""
        self._before.append(before)
        self._after.append(after)

    def block(self, block: Block) -> int:
        """Add many operations; returns the number of the first."""
        base = self._count
        self._count += block.operations
        self._blocks.append((base, block))
        return base

    def decision(self, after: Iterable[int] = ()) -> int:
        """Add a decision: it begins when the operations in ``after`` are done, and ends when a decider ends it."""
        return self.routed(0, DECISION, after)

    def addition(self) -> Addition:
        """What was added since ``settle``. Raises OverflowError for too many operations."""
        if self._count > MOST_OPERATIONS:
            raise OverflowError(f"{self._count} operations are more than can be numbered")
        number = np.array(self._number, dtype=np.int64)
        before, after = np.array(self._before, dtype=np.int64), np.array(self._after, dtype=np.int64)
        is_new = before >= self._first
        return Addition(
            first=self._first,
            count=self._count - self._first,
            number=number,
            duration_ns=np.array(self._duration_ns, dtype=np.int64),
            route=np.array(self._route, dtype=np.int32),
            edges=edges_of(np.searchsorted(number, before[is_new]), after[is_new], len(number)),
            after=after[is_new],
            earlier=np.stack((before[~is_new], after[~is_new]), axis=1),
            blocks=tuple(self._blocks),
        )

    def settle(self) -> None:
        """Start a new addition: the next ``addition`` contains only what is added from now on."""
        self._first = self._count
        for column in (self._number, self._duration_ns, self._route, self._before, self._after):
            del column[:]
        self._blocks.clear()

    def close(self) -> OperationGraph:
        """The graph so far. Raises OverflowError for too many operations."""
        assert not self._first, "what is settled is part of another graph"
        addition = self.addition()
        wide, narrow = lines(self._count)
        spilled = np.zeros(addition.spills, dtype=np.int32)
        graph = OperationGraph(
            wide, narrow, spilled, self.routes.columns(), self.resources, self.routes.queues
        )
        addition.fill(graph, 0)
        return graph
