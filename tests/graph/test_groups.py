"""Collectives of some ranks, messages between two, and ranks of different numbers of steps."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.scheduling.group_schedules import pairs_in_turn

from headway.cluster import AlgorithmCost, Cluster, Host
from headway.collectives.algorithms import ALL_GATHER, ALL_REDUCE, RING
from headway.collectives.dataflow import alone
from headway.collectives.selection import Selection
from headway.errors import UserError
from headway.graph.build import GraphBuilder, RankCursor
from headway.graph.computation import Part
from headway.graph.deciding import NO_RANK, Decision, Decisions
from headway.graph.disturbance import play_disturbed
from headway.graph.goal import GoalWriter
from headway.scheduling.groups import GroupSchedule
from headway.simulation.engine import play

MESSAGE_NS = 8000 + 20_000  # 1000 bytes at 1 Gb/s, and the latency


def cluster(ranks: int, **given: object) -> Cluster:
    hosts = tuple(Host(name=f"host{rank}", workers=1, up_gbps=1, down_gbps=1) for rank in range(ranks))
    return Cluster.model_validate({"hosts": hosts, "latency_us": 20, "library": "nccl", **given})


def graph_of(ranks: int, **given: object) -> tuple[GraphBuilder[GroupSchedule], list[RankCursor]]:
    return GraphBuilder(cluster(ranks, **given), pairs_in_turn(ranks)), [
        RankCursor(rank) for rank in range(ranks)
    ]


@pytest.mark.parametrize(("library", "apart"), [("gloo", True), ("nccl", False)])
def test_gloos_word_that_a_receiver_is_ready_follows_what_it_sends(library: str, apart: bool) -> None:
    """Rank 1 begins to send before it posts its receive: only then does rank 0 hear that it may send as well."""
    graph, (zero, one) = graph_of(2, library=library)
    for cursor in (zero, one):
        graph.compute(cursor, Part.FORWARD, 1000)
    graph.transfer(zero, 1, 0, 0, 10**6)
    back = graph.transfer(one, 1, 0, 0, 10**6)
    graph.compute(one, Part.FORWARD, 50_000)  # by now rank 0's word has come, and rank 1 sends
    graph.transfer(zero, 0, 1, 0, 10**6)
    forth = graph.transfer(one, 0, 1, 0, 10**6)
    for cursor in (zero, one):
        graph.wait(cursor, "both", back)
        graph.wait(cursor, "both", forth)
        graph.compute(cursor, Part.BACKWARD, 0)
    ends_ns = play(graph.close()).end_ns
    message_ns = 8 * 10**6
    took_ns = int(ends_ns[[zero.tail, one.tail]].max())
    assert (took_ns > 2 * message_ns) is apart
    assert took_ns < (2 if apart else 1) * message_ns + 200_000


@pytest.mark.parametrize("members", [(1, 3, 4), (4, 1), (0, 1, 2, 3, 4, 5)])
@pytest.mark.parametrize("kind", [ALL_REDUCE, ALL_GATHER])
def test_a_collective_of_some_ranks_is_that_of_a_cluster_of_them(kind: str, members: tuple[int, ...]) -> None:
    costs = {"gloo_all_reduce": AlgorithmCost(overhead_us=7, message_us=3, message_cpu_us=2)}
    graph, cursors = graph_of(6, algorithms=costs)
    selection = graph.selection_of(kind, 3_000_000, members)
    for rank in members:
        graph.launch(cursors[rank], kind, 0, 3_000_000, bucket=-1, selection=selection, members=members)
    few = cluster(len(members), algorithms=costs)
    expected_ns = play(alone(few, selection.program_of, 3_000_000, selection.cost(few))).end_ns.max()
    played = play(graph.close())
    assert played.end_ns[graph.collectives[0].ends].max() == played.end_ns.max() == expected_ns


def test_groups_in_different_steps_meet_by_members_and_key() -> None:
    """And those without a common rank are free of each other."""
    graph, cursors = graph_of(4)
    selection = Selection(RING, ALL_REDUCE)
    cursors[2].step = 7
    for rank, pair in ((0, (0, 2)), (1, (1, 3)), (2, (0, 2)), (3, (1, 3))):
        graph.launch(cursors[rank], ALL_REDUCE, 0, 2000, bucket=-1, selection=selection, members=pair)
    assert [tuple(each.members) for each in graph.collectives] == [(0, 2), (1, 3)]
    assert play(graph.close()).end_ns.max() == 2 * MESSAGE_NS


def test_what_a_member_never_asks_for_is_refused() -> None:
    graph, cursors = graph_of(3)
    selection = Selection(RING, ALL_REDUCE)
    graph.launch(cursors[0], "average", 0, 8, bucket=-1, selection=selection, members=(0, 2))
    with pytest.raises(ValueError, match=r"average of step 0, members \[0, 2\]: ranks \[2\] never call"):
        graph.close()
    graph, cursors = graph_of(3)
    graph.transfer(cursors[1], 1, 2, 0, 8)
    with pytest.raises(ValueError, match=r"transfer of step 0, members \[1, 2\]: ranks \[2\] never call"):
        graph.close()


@given(
    send_ns=st.integers(0, 10**6),
    receive_ns=st.integers(0, 10**6),
    size_bytes=st.just(0) | st.integers(1, 10**6),
)
def test_a_transfer_takes_both_sides_the_rate_and_the_latency(
    send_ns: int, receive_ns: int, size_bytes: int
) -> None:
    graph, cursors = graph_of(3)
    graph.compute(cursors[2], Part.BACKWARD, send_ns)
    graph.compute(cursors[0], Part.FORWARD, receive_ns)
    for cursor in (cursors[2], cursors[0]):
        number = graph.transfer(cursor, 2, 0, 5, size_bytes, name="activations")
        graph.wait(cursor, "activations", number)
        graph.compute(cursor, Part.FORWARD, 10)
    played = play(graph.close())
    end_ns = max(send_ns, receive_ns) + 20_000 + size_bytes * 8
    transfer = graph.communications[0]
    assert played.end_ns[transfer.begin_of(2)] == send_ns
    assert played.end_ns[transfer.begin_of(0)] == receive_ns
    assert [played.end_ns[transfer.end_of(rank)] for rank in (0, 2)] == [end_ns, end_ns]
    assert [played.end_ns[cursors[rank].tail] for rank in (0, 2)] == [end_ns + 10, end_ns + 10]


def test_transfers_share_links_and_those_of_a_channel_follow_each_other() -> None:
    def ends_ns(*messages: tuple[int, int, int]) -> list[int]:
        graph, cursors = graph_of(3)
        for key, (sender, receiver, channel) in enumerate(messages):
            for rank in (sender, receiver):
                graph.transfer(cursors[rank], sender, receiver, key, 1000, channel=channel)
        played = play(graph.close())
        return [int(played.end_ns[each.ends[1]]) for each in graph.communications]

    assert ends_ns((0, 1, 0), (1, 0, 0)) == [28_000, 28_000], "both directions are free of each other"
    assert ends_ns((0, 1, 0), (0, 2, 0)) == [36_000, 36_000], "at half of the rate"
    assert ends_ns((0, 1, 0), (0, 1, 0)) == [28_000, 36_000]
    assert ends_ns((0, 1, 0), (0, 1, 1)) == [36_000, 36_000]


def test_ranks_may_have_different_numbers_of_steps() -> None:
    graph, cursors = graph_of(3)
    for cursor, steps in zip(cursors, (3, 1, 2), strict=True):
        for cursor.step in range(steps):
            graph.compute(cursor, Part.FORWARD, 100)
            graph.boundary(cursor)
    assert graph.common_steps == [0]
    assert [len([ends for ends in graph.boundaries.values() if ends[rank] >= 0]) for rank in range(3)] == [
        3,
        1,
        2,
    ]
    assert play(graph.close()).end_ns.max() == 300


def test_a_collective_of_all_that_a_rank_of_fewer_steps_never_asks_for_is_refused() -> None:
    graph, cursors = graph_of(2)
    graph.launch(cursors[0], ALL_REDUCE, 0, 8, bucket=0, selection=Selection(RING, ALL_REDUCE))
    with pytest.raises(ValueError, match=r"ranks \[1\] never call"):
        graph.close()


def test_what_cannot_be_told_of_groups_is_refused() -> None:
    folded = GraphBuilder(cluster(4), pairs_in_turn(4), folded=2)
    with pytest.raises(AssertionError, match="between simulated ranks"):
        folded.transfer(RankCursor(0), 0, 2, 0, 8)
    with pytest.raises(AssertionError, match="played come first"):
        folded.launch(
            RankCursor(0), "x", 0, 8, bucket=-1, selection=Selection(RING, ALL_REDUCE), members=(2, 0)
        )
    with pytest.raises(AssertionError, match="folded"):
        Decisions(folded)
    graph, cursors = graph_of(2)
    for cursor in cursors:
        graph.transfer(cursor, 0, 1, 0, 8)
    with pytest.raises(UserError, match="GOAL export supports only collectives of all ranks"):
        GoalWriter(graph, graph.close())
    graph, cursors = graph_of(2)
    Decisions(graph).ask(cursors[0])
    with pytest.raises(ValueError, match="has decisions but no decider"):
        play_disturbed(graph, graph.close(), 0.5)


def test_computation_is_slowed_down_by_the_communication_of_its_own_rank_alone() -> None:
    graph, cursors = graph_of(4)
    for rank in (0, 1):
        graph.transfer(cursors[rank], 0, 1, 0, 100_000)
    for cursor in cursors:
        graph.compute(cursor, Part.FORWARD, 100_000)
    played = play_disturbed(graph, graph.close(), 0.5)
    assert [int(played.end_ns[cursor.tail]) for cursor in cursors] == [150_000, 150_000, 100_000, 100_000]


class FirstComeUntilDeadline:
    """The pure policy: who has arrived a while after the first of a group are the group, or all at once."""

    def __init__(self, world_size: int, patience_ns: int) -> None:
        self._world_size, self._patience_ns = world_size, patience_ns
        self._waiting: list[int] = []
        self._group = 0

    def arrived(self, rank: int) -> int:
        """Notes a rank; how long from now it wants to be woken, or 0."""
        self._waiting.append(rank)
        return self._patience_ns if len(self._waiting) == 1 else 0

    @property
    def group(self) -> int:
        """The number of the group that gathers."""
        return self._group

    def take(self, *, deadline_of: int = -1) -> tuple[int, ...]:
        """The group that is complete, because all are there or because its deadline has come."""
        if not self._waiting or (len(self._waiting) < self._world_size and deadline_of != self._group):
            return ()
        taken, self._waiting = tuple(sorted(self._waiting)), []
        self._group += 1
        return taken


def model_of_deadlines(
    compute_ns: Sequence[Sequence[int]], patience_ns: int, latency_ns: int
) -> list[list[int]]:
    """The same by a plain event loop. A ring of k ranks that sends nothing takes 2 (k - 1) latencies."""
    ends_ns: list[list[int]] = [[] for _ in compute_ns]
    events = [(steps[0], 0, rank) for rank, steps in enumerate(compute_ns)]
    heapq.heapify(events)
    waiting: list[int] = []
    group = 0
    while events:
        now_ns = events[0][0]
        deadlines = set()
        while events and events[0][0] == now_ns:
            _, kind, number = heapq.heappop(events)
            if kind:
                deadlines.add(number)
                continue
            waiting.append(number)
            if len(waiting) == 1:
                heapq.heappush(events, (now_ns + patience_ns, 1, group))
        if waiting and (len(waiting) == len(compute_ns) or group in deadlines):
            end_ns = now_ns + 2 * (len(waiting) - 1) * latency_ns
            for rank in waiting:
                ends_ns[rank].append(end_ns)
                if len(ends_ns[rank]) < len(compute_ns[rank]):
                    heapq.heappush(events, (end_ns + compute_ns[rank][len(ends_ns[rank])], 0, rank))
            waiting, group = [], group + 1
    return ends_ns


class GatheredTraining:
    """Drives ``FirstComeUntilDeadline`` in a simulation."""

    def __init__(self, compute_ns: Sequence[Sequence[int]], patience_ns: int) -> None:
        self._compute_ns = compute_ns
        self.graph, self._cursors = graph_of(len(compute_ns))
        self.decisions = Decisions(self.graph)
        self._policy = FirstComeUntilDeadline(len(compute_ns), patience_ns)
        self._standing: dict[int, Decision] = {}
        for cursor in self._cursors:
            self._lay_out(cursor)

    def _lay_out(self, cursor: RankCursor) -> None:
        if cursor.step < len(self._compute_ns[cursor.rank]):
            self.graph.compute(cursor, Part.FORWARD, self._compute_ns[cursor.rank][cursor.step])
            self.decisions.ask(cursor)
            self.graph.boundary(cursor)
            cursor.step += 1

    def decide(self, now_ns: int, asked: Sequence[Decision]) -> None:
        group = self._policy.group
        deadlines = [int(each.name) for each in asked if each.rank == NO_RANK]
        for each in asked:
            if each.rank != NO_RANK:
                self._standing[each.rank] = each
                if wake_ns := self._policy.arrived(each.rank):
                    self.decisions.ask_in(wake_ns, str(group))
        members = self._policy.take(deadline_of=group if group in deadlines else -1)
        for rank in members:
            decision = self._standing.pop(rank)
            cursor = self.decisions.cursor_at(decision)
            if len(members) > 1:
                number = self.graph.launch(
                    cursor,
                    "average",
                    group,
                    0,
                    bucket=-1,
                    selection=Selection(RING, ALL_REDUCE),
                    members=members,
                )
                self.graph.wait(cursor, "average", number)
            self.decisions.answer(decision, cursor)
            self._lay_out(self._cursors[rank])


@settings(deadline=None)
@given(
    compute_ns=st.lists(st.lists(st.integers(1, 10**6), min_size=1, max_size=5), min_size=2, max_size=5),
    patience_ns=st.integers(1, 10**6),
)
def test_a_policy_may_ask_to_be_woken_later(compute_ns: list[list[int]], patience_ns: int) -> None:
    training = GatheredTraining(compute_ns, patience_ns)
    played = training.decisions.play(training)
    boundaries = training.graph.boundaries
    ends_ns = [
        [int(played.end_ns[boundaries[step][rank]]) for step in range(len(steps))]
        for rank, steps in enumerate(compute_ns)
    ]
    assert ends_ns == model_of_deadlines(compute_ns, patience_ns, 20_000)


def test_a_decider_may_send_a_message_that_ranks_wait_for() -> None:
    graph, cursors = graph_of(2)
    decisions = Decisions(graph)
    for cursor, duration_ns in zip(cursors, (100, 300), strict=True):
        graph.compute(cursor, Part.FORWARD, duration_ns)
        decisions.ask(cursor)
        graph.compute(cursor, Part.BACKWARD, 50)

    class WhenBothAreThere:
        def __init__(self) -> None:
            self.there: list[Decision] = []

        def decide(self, now_ns: int, asked: Sequence[Decision]) -> None:
            self.there += asked
            for each in self.there if len(self.there) == 2 else ():
                cursor = decisions.cursor_at(each)
                graph.wait(cursor, "state", graph.transfer(cursor, 0, 1, 0, 1000))
                decisions.answer(each, cursor)

    played = decisions.play(WhenBothAreThere())
    assert [int(played.end_ns[cursor.tail]) for cursor in cursors] == [300 + MESSAGE_NS + 50] * 2
