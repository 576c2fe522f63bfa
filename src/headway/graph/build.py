"""Builds the graph of all ranks: their computation, and the collectives and messages that they launch and wait for."""

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
    """A collective or message of ``members``, with one begin and one end operation per member, in their order."""

    name: str
    step: int  # of the member that launched first
    size_bytes: int
    members: Sequence[int]
    begins: list[int]
    ends: list[int]
    channel: int
    asked_by: set[int] = field(default_factory=set, init=False)

    def begin_of(self, rank: int) -> int:
        """The begin of a member. Raises ValueError if ``rank`` is not a member."""
        return self.begins[self.members.index(rank)]

    def end_of(self, rank: int) -> int:
        """The end of a member. Raises ValueError if ``rank`` is not a member."""
        return self.ends[self.members.index(rank)]

    def check_asked(self) -> None:
        """Raise UserError if a member has not launched it: it would begin without that member."""
        if missing := [rank for rank in self.members if rank not in self.asked_by]:
            raise UserError(
                "cannot replay: ranks take part in different collectives",
                got=f"{self.name} of step {self.step}, members {list(self.members)}: ranks {missing} never call it",
                fix="Record steps in which all ranks call the same collectives.",
            )


@dataclass(slots=True)
class PlacedCollective(Communication):
    """A collective in the graph."""

    selection: Selection
    bucket: int
    group: tuple[int, ...]  # if not of all ranks: its ranks, of which ``members`` are simulated
    base: int = -1  # its first operation, once it is expanded


@dataclass(slots=True)
class PlacedTransfer(Communication):
    """A message from the first member to the second."""

    operation: int


S = TypeVar("S", bound=Schedule)


UPDATE, CODEC = "update", "codec"


@dataclass(slots=True)
class RankCursor:
    """The position of one rank while it is laid out; ``tail`` is the last operation of its main thread."""

    rank: int
    step: int = 0
    tail: int = -1
    pending: list[int] = field(default_factory=list)  # ends that the main thread waits for next
    pending_work: list[int] = field(default_factory=list)  # and operations off it
    wait_name: str = ""


@dataclass(slots=True)
class ComputeSpan:
    """What an operation of a main thread computes. ``waited_for`` are the collectives that it waited for."""

    rank: int
    step: int
    part: str
    operation: int
    bucket: int = -1
    wait_name: str = ""
    waited_for: tuple[int, ...] = ()


@dataclass(slots=True)
class Work:
    """Computation off a rank's main thread: the update of its part of a bucket, or a codec's work on a bucket.

    ``slowdown`` is the relative slowdown of the main thread in the meantime.
    """

    rank: int
    step: int
    operation: int
    bucket: int
    kind: str = UPDATE
    slowdown: float = 0.0


READY_BYTES = 64  # about the size of Gloo's message that a receiver is ready
# A thread needs this long to wake up and post the next receive after what it waited for. Anything triggered by that
# arrival, such as a message the other way, goes first.
POSTING_NS = 100_000


class GraphBuilder(Generic[S]):
    """The graph under construction, to which strategies add computation, collectives and messages.

    It simulates ``ranks`` of the ``world_size`` ranks: all, or the first ``folded`` ones, which stand for all.
    ``resources`` may be those of an earlier graph on the same cluster with the same folding; they cache its layouts.
    """

    def __init__(
        self,
        cluster: Cluster,
        schedule: S,
        folded: int = 0,
        resources: ClusterResources | None = None,
    ) -> None:
        self.cluster = cluster
        # Slowdown of parts of a step while collectives are in flight, if it differs from the cluster's.
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
        """Which ranks share a host."""
        return Hosts.of_cluster(self.cluster)

    def compute(self, cursor: RankCursor, part: str, duration_ns: int, bucket: int = -1) -> None:
        """Add computation to a main thread, after everything that it has to wait for."""
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
        """Make the main thread's next computation wait for a collective or transfer of which it is a member."""
        if communication not in cursor.pending:
            cursor.pending.append(communication)
        cursor.wait_name = name

    def wait_for_work(self, cursor: RankCursor, operation: int) -> None:
        """Make the main thread's next computation also wait for an operation from ``work``."""
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
        """Add computation for ``bucket`` off the main thread; returns its operation.

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
        """Launch a collective of ``size_bytes`` on this rank. Returns its number.

        A collective of all ranks is matched by (name, bucket, step, key). One of ``members`` (distinct ranks that
        include this one) is matched by (name, bucket, members, key), so members may be in different steps and must use
        a key only once. If members are folded, only simulated ones launch it. On this rank it begins after everything
        on the main thread so far, after the collectives and transfers ``after`` and the operations ``after_work``.
        ``selection`` must be for that number of members (``selection_of``). Channels have separate connections. Every
        member must launch it before the graph is closed, or within the same decision; ``close`` raises UserError
        otherwise.
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
        """Post a message of ``size_bytes`` on this rank, its sender or receiver. Returns its number.

        Both sides are matched by (sender, receiver, key, name); a pair uses a key only once. The message leaves when
        both sides have posted it, and ends on both when it arrives. It has the latency and rate of its path, and shares
        links as messages of collectives do. Messages of a pair on one channel follow each other. With Gloo, the
        receiver first sends a ready message, which queues behind what it is sending the other way. ``after`` and
        ``after_work`` are as for ``launch``. Both sides must post it before the graph is closed, or within the same
        decision; ``close`` raises UserError otherwise. Ranks that are not simulated send nothing.
        """
        assert max(sender, receiver) < self.ranks, "messages are between simulated ranks"
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
        """The operations after which a message leaves, if its two sides begin at ``begins``."""
        if self.cluster.library != GLOO:
            return begins
        sender_begins, receiver_begins = begins
        posted = self._operations.operation(POSTING_NS, after=[receiver_begins])
        word = self._resources.message(receiver, sender, READY_BYTES, channel)
        return [sender_begins, self._operations.routed(*word, [posted])]

    def selection_of(self, kind: str, size_bytes: int, members: Sequence[int] | None = None) -> Selection:
        """The library's own algorithm for a collective ``kind`` of ``size_bytes`` over all ranks, or over ``members``."""
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
        """The positions of the steps that every rank finishes, in order."""
        return [step for step in sorted(self.boundaries) if min(self.boundaries[step]) >= 0]

    @property
    def collectives(self) -> list[PlacedCollective]:
        """The collectives, in the order of their first launch."""
        return [
            communication
            for communication in self.communications
            if isinstance(communication, PlacedCollective)
        ]

    @property
    def operations(self) -> OperationGraphBuilder:
        """The operations of the graph, including those added while it is played."""
        return self._operations

    def close(self) -> OperationGraph:
        """Expand every collective into its transfers and close the graph.

        Raises UserError if a member of a collective or transfer has not launched it.
        """
        self.expand()
        return self._operations.close()

    def expand(self) -> None:
        """Expand new collectives into their transfers. Raises as ``close`` does."""
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
    """A view of the ``parent`` graph in which ``members`` are all ranks, under their own ``schedule``.

    Everything is laid out in ``parent``; only that may be closed or played. Cursors use the ranks of ``parent``.
    ``number`` (below ``views``) tells apart the collectives of several views with the same members.
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
        """As in ``parent``, with the members in place of all ranks; they use a key only once."""
        return self._parent.launch(
            cursor, name, key * self._views + self._number, size_bytes, bucket=bucket, selection=selection,
            channel=channel, after=after, after_work=after_work,
            members=self._members if members is None else members,
        )  # fmt: skip
