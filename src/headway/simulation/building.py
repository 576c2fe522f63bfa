"""Building graphs of operations: one by one or many at once, also while they are played."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from headway.arrays import Ints
from headway.simulation.operations import (
    DECIDED,
    DECISION,
    DURATION,
    FREE,
    MOST_OPERATIONS,
    NO_RESOURCE,
    NONE,
    ROUTE,
    SPILL,
    SUCCESSORS,
    WAITS,
    WHOLE,
    Block,
    Edges,
    Numbers,
    OperationGraph,
    Resources,
    Routes,
    edges_of,
    lines,
)  # fmt: skip


class RouteTable:
    """Numbers for what operations use, under which graphs know it; several graphs may share a table."""

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
        asked: float = 1.0,
    ) -> int:
        """What operations use, as a number. Queues are counted by themselves on each sender's side.

        ``asked`` is how much of the sender's and of the receiver's side they take at their full rate, in WHOLE.
        """
        line = NO_RESOURCE
        if sender != NO_RESOURCE or receiver != NO_RESOURCE:
            line = self._queues.setdefault((sender, queue), len(self._queues))
        units = max(1, round(asked * WHOLE))
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
        asked, latency_ns = (np.array(column, dtype=np.int64) for column in columns[3:])
        return Routes(sender, receiver, asked, queue, latency_ns)


@dataclass(frozen=True, slots=True, eq=False)
class Addition:
    """What was added to a builder: operations from ``first`` on, ``count`` of them, and edges.

    ``number``, ``duration_ns`` and ``route`` are those of operations that came one by one, ``edges`` the edges out of
    them, ``after`` where those lead. ``earlier`` are edges (before, after) out of operations that were there before.
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
        """Write the operations, and their edges but for the ``earlier`` ones; what spills from ``spill`` on."""
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
        asked: float = 1.0,
    ) -> int:
        """Add an operation that waits for those in ``after``; returns its number."""
        plain = sender == NO_RESOURCE and receiver == NO_RESOURCE and not latency_ns
        route = (
            FREE
            if plain
            else self.routes.number(sender, receiver, queue=queue, latency_ns=latency_ns, asked=asked)
        )
        return self.routed(duration_ns, route, after)

    def routed(self, duration_ns: int, route: int, after: Iterable[int] = ()) -> int:
        """Add an operation that uses what ``route`` says, a number of ``routes``; returns its number."""
        number = self._count
        self._count += 1
        self._number.append(number)
        self._duration_ns.append(duration_ns)
        self._route.append(route)
        for before in after:
            self.edge(before, number)
        return number

    def edge(self, before: int, after: int) -> None:
        """Have ``after`` wait for ``before``, which is not part of a block."""
        self._before.append(before)
        self._after.append(after)

    def block(self, block: Block) -> int:
        """Add many operations; returns the number of the first."""
        base = self._count
        self._count += block.operations
        self._blocks.append((base, block))
        return base

    def decision(self, after: Iterable[int] = ()) -> int:
        """Add an operation that lasts from when those in ``after`` are done until a decider lets it end."""
        return self.routed(0, DECISION, after)

    def addition(self) -> Addition:
        """What was added since ``settle``. Raises OverflowError where operations are more than can be numbered."""
        if self._count > MOST_OPERATIONS:
            raise OverflowError(f"{self._count} operations are more than can be numbered")
        number = np.array(self._number, dtype=np.int64)
        before, after = np.array(self._before, dtype=np.int64), np.array(self._after, dtype=np.int64)
        own = before >= self._first
        return Addition(
            first=self._first,
            count=self._count - self._first,
            number=number,
            duration_ns=np.array(self._duration_ns, dtype=np.int64),
            route=np.array(self._route, dtype=np.int32),
            edges=edges_of(np.searchsorted(number, before[own]), after[own], len(number)),
            after=after[own],
            earlier=np.stack((before[~own], after[~own]), axis=1),
            blocks=tuple(self._blocks),
        )

    def settle(self) -> None:
        """Take what was added so far as given: the next ``addition`` begins behind it."""
        self._first = self._count
        for column in (self._number, self._duration_ns, self._route, self._before, self._after):
            del column[:]
        self._blocks.clear()

    def close(self) -> OperationGraph:
        """The graph so far. Raises OverflowError where it has more operations than can be numbered."""
        assert not self._first, "what is settled is part of another graph"
        addition = self.addition()
        wide, narrow = lines(self._count)
        spilled = np.zeros(addition.spills, dtype=np.int32)
        made = OperationGraph(
            wide, narrow, spilled, self.routes.columns(), self.resources, self.routes.queues
        )
        addition.fill(made, 0)
        return made
