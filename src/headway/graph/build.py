"""Building the global graph: computation of all ranks, and the collectives that they ask and wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from headway.cluster import Cluster
from headway.collectives.dataflow import expand
from headway.collectives.resources import ClusterResources
from headway.collectives.selection import Selection
from headway.scheduling.schedule import Schedule
from headway.simulation.operations import OperationGraph

S = TypeVar("S", bound=Schedule)


@dataclass(slots=True)
class RankCursor:
    """How far one rank is laid out: ``tail`` is the last operation of its main thread."""

    rank: int
    step: int = 0
    tail: int = -1
    pending: list[int] = field(default_factory=list)  # ends that the main thread waits for next
    wait_name: str = ""


@dataclass(slots=True)
class ComputeSpan:
    """What an operation of a main thread stands for. ``waited_for`` are the collectives it waited for."""

    rank: int
    step: int
    part: str
    operation: int
    bucket: int = -1
    wait_name: str = ""
    waited_for: tuple[int, ...] = ()


@dataclass(slots=True)
class Work:
    """Computation beside a rank's main thread: the update of its share of a bucket."""

    rank: int
    step: int
    operation: int
    bucket: int


@dataclass(slots=True)
class PlacedCollective:
    """A collective in the graph: one begin and one end a rank (operations)."""

    name: str
    selection: Selection
    step: int
    bucket: int
    size_bytes: int
    begins: list[int]
    ends: list[int]
    channel: int
    base: int = -1  # its first operation, once the graph is closed


class GraphBuilder(Generic[S]):
    """The graph under construction, as strategies see it.

    It has ``ranks`` of the ``world_size`` ranks: all, or the first of those that are ``folded`` onto them. The
    ``resources`` are those of ``cluster`` that another graph was built on, folded alike, and know what that has laid
    out.
    """

    def __init__(
        self,
        cluster: Cluster,
        schedule: S,
        folded: int = 0,
        resources: ClusterResources | None = None,
    ) -> None:
        self.cluster = cluster
        # By how much collectives in flight slow parts of a step down, where that is not the cluster's own slowdown.
        self.slowdowns: Mapping[str, float] = {}
        self.schedule = schedule
        self.world_size = cluster.world_size
        self.ranks = folded or cluster.world_size
        self.spans: list[ComputeSpan] = []
        self.works: list[Work] = []
        self.boundaries: dict[int, list[int]] = {}  # step position -> one operation a rank
        self.collectives: list[PlacedCollective] = []
        self._resources = resources or ClusterResources(cluster, folded)
        self._operations = self._resources.builder()
        self._placed: dict[tuple[str, int, int, int], int] = {}

    def compute(self, cursor: RankCursor, part: str, duration_ns: int, bucket: int = -1) -> None:
        """Add computation to a main thread, after what it has to wait for."""
        after = [cursor.tail] if cursor.tail >= 0 else []
        waits = tuple(cursor.pending)
        after += [self.collectives[number].ends[cursor.rank] for number in waits]
        cursor.tail = self._operations.operation(duration_ns, after=after)
        self.spans.append(
            ComputeSpan(cursor.rank, cursor.step, part, cursor.tail, bucket, cursor.wait_name, waits)
        )
        cursor.pending.clear()
        cursor.wait_name = ""

    def wait(self, cursor: RankCursor, name: str, collective: int) -> None:
        """Have the main thread's next computation wait for a collective."""
        if collective not in cursor.pending:
            cursor.pending.append(collective)
        cursor.wait_name = name

    def work(self, cursor: RankCursor, duration_ns: int, *, bucket: int, after: Sequence[int] = ()) -> int:
        """Add computation beside the main thread, of ``bucket``; returns its operation.

        It begins after everything on this rank's main thread so far and after the collectives ``after``.
        """
        before = [cursor.tail] if cursor.tail >= 0 else []
        before += [self.collectives[number].ends[cursor.rank] for number in after]
        operation = self._operations.operation(duration_ns, after=before)
        self.works.append(Work(cursor.rank, cursor.step, operation, bucket))
        return operation

    def launch(
        self,
        cursor: RankCursor,
        name: str,
        key: int,
        size_bytes: int,
        *,
        bucket: int,
        selection: Selection,
        channel: int = 0,
        after: Sequence[int] = (),
        after_work: Sequence[int] = (),
    ) -> int:
        """Have this rank ask for a collective, matched over ranks by (name, bucket, step, key). Returns its number.

        On this rank it begins after everything on its main thread so far, after the collectives ``after`` and after
        the operations ``after_work``. Collectives of different channels have connections of their own.
        """
        place = (name, bucket, cursor.step, key)
        number = self._placed.get(place, -1)
        if number < 0:
            number = self._placed[place] = len(self.collectives)
            begins = [self._operations.operation() for _ in range(self.ranks)]
            ends = [self._operations.operation() for _ in range(self.ranks)]
            self.collectives.append(
                PlacedCollective(name, selection, cursor.step, bucket, size_bytes, begins, ends, channel)
            )
        begin = self.collectives[number].begins[cursor.rank]
        if cursor.tail >= 0:
            self._operations.edge(cursor.tail, begin)
        for earlier in after:
            self._operations.edge(self.collectives[earlier].ends[cursor.rank], begin)
        for operation in after_work:
            self._operations.edge(operation, begin)
        return number

    def boundary(self, cursor: RankCursor) -> None:
        """Mark the end of this rank's step."""
        self.boundaries.setdefault(cursor.step, [-1] * self.ranks)[cursor.rank] = cursor.tail

    def close(self) -> OperationGraph:
        """Expand every collective into its transfers and close the graph."""
        for collective in self.collectives:
            collective.base = expand(
                self._operations,
                self._resources,
                collective.selection.program_of,
                collective.size_bytes,
                collective.begins,
                collective.ends,
                collective.selection.cost(self.cluster),
                collective.channel,
            )
        return self._operations.close()
