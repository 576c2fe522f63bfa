"""Building the global graph: computation of all ranks, and the collectives that they ask and wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from headway.cluster import Cluster
from headway.collectives.dataflow import expand, expand_nccl
from headway.collectives.hierarchical import Hosts
from headway.collectives.resources import ClusterResources
from headway.collectives.selection import GLOO, Selection, native
from headway.collectives.server_hosts import expand_served
from headway.errors import UserError
from headway.scheduling.schedule import Schedule
from headway.simulation.building import OperationGraph, OperationGraphBuilder


@dataclass(slots=True)
class Communication:
    """What ``members`` do together: each has one begin and one end (operations), in the members' order."""

    name: str
    step: int  # of the member that asked first
    size_bytes: int
    members: Sequence[int]
    begins: list[int]
    ends: list[int]
    channel: int
    asked_by: set[int] = field(default_factory=set, init=False)

    def begin_of(self, rank: int) -> int:
        """The begin of a member. Raises ValueError where it is none."""
        return self.begins[self.members.index(rank)]

    def end_of(self, rank: int) -> int:
        """The end of a member. Raises ValueError where it is none."""
        return self.ends[self.members.index(rank)]

    def check_asked(self) -> None:
        """Raise UserError where a member has not asked for it: it would begin without that member."""
        if missing := [rank for rank in self.members if rank not in self.asked_by]:
            raise UserError(
                "ranks take part in different collectives, which cannot be replayed",
                got=f"{self.name} of step {self.step}, members {list(self.members)}: ranks {missing} never ask for it",
                fix="Record steps in which all ranks do the same.",
            )


@dataclass(slots=True)
class PlacedCollective(Communication):
    """A collective in the graph."""

    selection: Selection
    bucket: int
    group: tuple[int, ...]  # where it is of some ranks: all of these, of which the members are played
    base: int = -1  # its first operation, once it is expanded


@dataclass(slots=True)
class PlacedTransfer(Communication):
    """A message from one rank, the first member, to another, the second."""

    operation: int


S = TypeVar("S", bound=Schedule)


UPDATE, CODEC = "update", "codec"


@dataclass(slots=True)
class RankCursor:
    """How far one rank is laid out: ``tail`` is the last operation of its main thread."""

    rank: int
    step: int = 0
    tail: int = -1
    pending: list[int] = field(default_factory=list)  # ends that the main thread waits for next
    pending_work: list[int] = field(default_factory=list)  # and operations off it
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
    """Computation off a rank's main thread: the update of its share of a bucket, or what a codec does to a bucket.

    ``slowdown`` is how much longer the main thread computes meanwhile.
    """

    rank: int
    step: int
    operation: int
    bucket: int
    kind: str = UPDATE
    slowdown: float = 0.0


READY_BYTES = 64  # about what Gloo says that a receiver is ready with
# From what a rank waited for to its word about the next receive: a thread wakes and posts it. What has come with the
# former, such as a word that lets a message go the other way, is first.
POSTING_NS = 100_000


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
        self.communications: list[Communication] = []
        self._resources = resources or ClusterResources(cluster, folded)
        self._operations = self._resources.builder()
        self._placed: dict[tuple[object, ...], int] = {}
        self._expanded = 0  # communications that are

    @property
    def hosts(self) -> Hosts:
        """Which of its ranks share a host."""
        return Hosts.of_cluster(self.cluster)

    def compute(self, cursor: RankCursor, part: str, duration_ns: int, bucket: int = -1) -> None:
        """Add computation to a main thread, after what it has to wait for."""
        after = [cursor.tail] if cursor.tail >= 0 else []
        waits = tuple(cursor.pending)
        after += [self.communications[number].end_of(cursor.rank) for number in waits]
        after += cursor.pending_work
        cursor.tail = self._operations.operation(duration_ns, after=after)
        self.spans.append(
            ComputeSpan(cursor.rank, cursor.step, part, cursor.tail, bucket, cursor.wait_name, waits)
        )
        cursor.pending.clear()
        cursor.pending_work.clear()
        cursor.wait_name = ""

    def wait(self, cursor: RankCursor, name: str, communication: int) -> None:
        """Have the main thread's next computation wait for a collective or transfer that it is a member of."""
        if communication not in cursor.pending:
            cursor.pending.append(communication)
        cursor.wait_name = name

    def wait_for_work(self, cursor: RankCursor, operation: int) -> None:
        """Have the main thread's next computation wait for what ``work`` has added, too."""
        cursor.pending_work.append(operation)

    def work(
        self,
        cursor: RankCursor,
        duration_ns: int,
        *,
        bucket: int,
        after: Sequence[int] = (),
        after_work: Sequence[int] = (),
        kind: str = UPDATE,
        slowdown: float = 0.0,
    ) -> int:
        """Add computation off the main thread, of ``bucket``; returns its operation.

        It begins after everything on this rank's main thread so far, after the collectives ``after`` and after the
        operations ``after_work``. The main thread takes longer by ``slowdown`` meanwhile.
        """
        before = [cursor.tail] if cursor.tail >= 0 else []
        before += [self.communications[number].end_of(cursor.rank) for number in after]
        operation = self._operations.operation(duration_ns, after=[*before, *after_work])
        self.works.append(Work(cursor.rank, cursor.step, operation, bucket, kind, slowdown))
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
        members: Sequence[int] | None = None,
    ) -> int:
        """Have this rank ask for a collective of ``size_bytes``. Returns its number.

        It is one of all ranks, matched over them by (name, bucket, step, key); or of ``members``, distinct ranks with
        this one among them, matched by (name, bucket, members, key): so members may be in different steps, and the
        same members use a key once. Of folded members those that are played ask. On this rank it begins after
        everything on its main thread so far, after the collectives and transfers ``after`` and after the operations
        ``after_work``. ``selection`` is one for as many ranks as there are members (``selection_of``). Collectives of
        different channels have connections of their own. Every member has to ask: before the graph is closed, or within
        the same decision; ``close`` raises ValueError otherwise.
        """
        partial = members is not None
        group: Sequence[int] = range(self.world_size) if members is None else tuple(members)
        ranks = group[: self._resources.played(group)] if partial else range(self.ranks)
        assert not partial or len(set(ranks)) == len(ranks), "members are distinct"
        assert cursor.rank in ranks, "a member asks"
        place = (name, bucket, ranks if partial else cursor.step, key)
        number = self._placed.get(place, -1)
        if number < 0:
            number = self._placed[place] = len(self.communications)
            begins, ends = self._begins_and_ends(len(ranks))
            self.communications.append(
                PlacedCollective(
                    name,
                    cursor.step,
                    size_bytes,
                    ranks,
                    begins,
                    ends,
                    channel,
                    selection,
                    bucket,
                    tuple(group) if partial else (),
                )
            )
        self._ask(cursor, number, after, after_work)
        return number

    def transfer(
        self,
        cursor: RankCursor,
        sender: int,
        receiver: int,
        key: int,
        size_bytes: int,
        *,
        name: str = "transfer",
        channel: int = 0,
        after: Sequence[int] = (),
        after_work: Sequence[int] = (),
    ) -> int:
        """Have this rank, the sender or the receiver, ask for a message of ``size_bytes``. Returns its number.

        Both sides are matched by (sender, receiver, key, name), so that a pair uses a key once. The message leaves
        when both have come to it, the receiver as one who posts a receive, and ends on both when it has arrived: it
        takes the latency and the rate of what is between them, and shares links as messages of collectives do.
        Messages of a pair on one channel follow each other. Under Gloo the receiver first sends word that it is ready,
        which follows what it is sending the other way. When a side begins is said as for ``launch``. Both sides
        have to ask: before the graph is closed, or within the same decision; ``close`` raises ValueError otherwise.
        Ranks that are not played, as others stand for them, send nothing.
        """
        assert max(sender, receiver) < self.ranks, "messages are between ranks that are played"
        assert sender != receiver, "a message goes to another rank"
        assert cursor.rank in (sender, receiver), "the sender or the receiver asks"
        place = (name, sender, receiver, key, PlacedTransfer)
        number = self._placed.get(place, -1)
        if number < 0:
            number = self._placed[place] = len(self.communications)
            begins, ends = self._begins_and_ends(2)
            duration_ns, route = self._resources.message(sender, receiver, size_bytes, channel)
            message = self._operations.routed(
                duration_ns, route, self._ready(begins, sender, receiver, channel)
            )
            for end in ends:
                self._operations.edge(message, end)
            self.communications.append(
                PlacedTransfer(
                    name, cursor.step, size_bytes, (sender, receiver), begins, ends, channel, message
                )
            )
        self._ask(cursor, number, after, after_work)
        return number

    def _ready(self, begins: list[int], sender: int, receiver: int, channel: int) -> list[int]:
        """What a message leaves after, whose two sides begin at ``begins``."""
        if self.cluster.library != GLOO:
            return begins
        sender_begins, receiver_begins = begins
        posted = self._operations.operation(POSTING_NS, after=[receiver_begins])
        word = self._resources.message(receiver, sender, READY_BYTES, channel)
        return [sender_begins, self._operations.routed(*word, [posted])]

    def selection_of(self, kind: str, size_bytes: int, members: Sequence[int] | None = None) -> Selection:
        """The library's own ``kind`` of a tensor of ``size_bytes`` over all ranks, or over ``members``."""
        count = self.world_size if members is None else len(members)
        return native(kind, size_bytes, count, self.cluster.library)

    def _begins_and_ends(self, count: int) -> tuple[list[int], list[int]]:
        operation = self._operations.operation
        return [operation() for _ in range(count)], [operation() for _ in range(count)]

    def _ask(self, cursor: RankCursor, number: int, after: Sequence[int], after_work: Sequence[int]) -> None:
        communication = self.communications[number]
        assert number >= self._expanded, "asked for after it had begun: members ask within one decision"
        communication.asked_by.add(cursor.rank)
        begin = communication.begin_of(cursor.rank)
        if cursor.tail >= 0:
            self._operations.edge(cursor.tail, begin)
        for earlier in after:
            self._operations.edge(self.communications[earlier].end_of(cursor.rank), begin)
        for operation in after_work:
            self._operations.edge(operation, begin)

    def boundary(self, cursor: RankCursor) -> None:
        """Mark the end of this rank's step. Ranks may have different numbers of steps."""
        self.boundaries.setdefault(cursor.step, [-1] * self.ranks)[cursor.rank] = cursor.tail

    @property
    def common_steps(self) -> list[int]:
        """The positions of the steps that every rank comes to the end of, in order."""
        return [step for step in sorted(self.boundaries) if min(self.boundaries[step]) >= 0]

    @property
    def collectives(self) -> list[PlacedCollective]:
        """The collectives, in the order in which they were asked for first."""
        return [
            communication
            for communication in self.communications
            if isinstance(communication, PlacedCollective)
        ]

    @property
    def operations(self) -> OperationGraphBuilder:
        """The operations that the graph is made of, and of what is added while it is played."""
        return self._operations

    def close(self) -> OperationGraph:
        """Expand every collective into its transfers and close the graph.

        Raises ValueError where a collective or transfer was not asked for by all of its members.
        """
        self.expand()
        return self._operations.close()

    def expand(self) -> None:
        """Expand the collectives that are not yet into their transfers. Raises as ``close`` does."""
        for communication in self.communications[self._expanded :]:
            communication.check_asked()
            if isinstance(communication, PlacedCollective):
                communication.base = self._laid_out(communication)
        self._expanded = len(self.communications)

    def _laid_out(self, collective: PlacedCollective) -> int:
        selection = collective.selection
        members = collective.group
        if selection.server_hosts is not None:
            assert not members, "hosts serve all ranks"
            return expand_served(
                self._operations,
                self._resources,
                collective.size_bytes,
                collective.begins,
                collective.ends,
                selection.cost(self.cluster),
                collective.channel,
                selection.server_hosts,
            )
        if selection.is_timed_by_nccl(self.cluster):
            return expand_nccl(
                self._operations,
                self._resources,
                selection.kind,
                collective.size_bytes,
                collective.begins,
                collective.ends,
                selection.cost(self.cluster),
                collective.channel,
                members,
            )
        return expand(
            self._operations,
            self._resources,
            selection.program_of,
            collective.size_bytes,
            collective.begins,
            collective.ends,
            selection.cost(self.cluster),
            collective.channel,
            members,
        )


class GroupGraph(GraphBuilder[S]):
    """A view of the ``parent`` graph in which ``members`` are all ranks there are, under a ``schedule`` of their own.

    Everything is laid out in ``parent``, which alone may be closed or played. Cursors have the ranks of ``parent``, and
    each collective is one of the members. Of several views with the same members this is the one of ``number`` (below
    ``views``), whose collectives are its own.
    """

    def __init__(
        self, parent: GraphBuilder[Any], schedule: S, members: Sequence[int], number: int = 0, views: int = 1
    ) -> None:
        vars(self).update(vars(parent))  # all that is laid out is shared
        self.schedule = schedule
        self.world_size = len(members)
        self._parent = parent
        self._members = tuple(members)
        self._number, self._views = number, views

    @property
    def hosts(self) -> Hosts:
        """Which members share a host, by their numbers among the members."""
        host_of_rank = self.cluster.host_of_rank
        return Hosts.of_places([host_of_rank[member] for member in self._members])

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
        members: Sequence[int] | None = None,
    ) -> int:
        """As of the whole graph, with the members for all ranks: they use a key once."""
        return self._parent.launch(
            cursor, name, key * self._views + self._number, size_bytes, bucket=bucket, selection=selection,
            channel=channel, after=after, after_work=after_work,
            members=self._members if members is None else members,
        )  # fmt: skip
