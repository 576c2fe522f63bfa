from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulation.graphs import DrawnOperation, drawn_operations, drawn_resources

from headway.simulation import engine, kernel
from headway.simulation.building import WHOLE, OperationGraphBuilder, Resources
from headway.simulation.deciding import NEVER_NS, DeadlockError, play_deciding
from headway.simulation.engine import PlayedTimes, play

PLAYERS = pytest.mark.parametrize(
    "simulate", [kernel.simulate, engine._compiled()], ids=["plain", "compiled"]
)
Player = Callable[..., kernel.PlayState]


class AtTimes:
    """At each decision the next of some functions is called, and the decision ends."""

    def __init__(self, *actions: Callable[[], object]) -> None:
        self._actions = list(actions)
        self.asked_ns: list[int] = []

    def decide(self, now_ns: int, asked: Sequence[int]) -> Iterable[int]:
        self.asked_ns.append(now_ns)
        if self._actions:
            self._actions.pop(0)()
        return asked


def add(
    builder: OperationGraphBuilder, operations: Iterable[DrawnOperation], base: int = 0, *more: int
) -> None:
    for one in operations:
        builder.operation(
            one.duration_ns, after=[*(base + before for before in one.after), *more], latency_ns=one.latency_ns,
            sender=one.sender, receiver=one.receiver, queue=one.queue, demand=one.asked,
        )  # fmt: skip


def times(played: PlayedTimes, first: int = 0) -> tuple[list[int], list[int]]:
    return played.start_ns[first:].tolist(), played.end_ns[first:].tolist()


@PLAYERS
@settings(deadline=None)
@given(
    drawn_operations(), drawn_resources(), st.lists(st.integers(0, 5000) | st.integers(0, 10**6), max_size=5)
)
def test_being_asked_changes_nothing(
    simulate: Player, operations: list[DrawnOperation], resources: Resources, delays_ns: list[int]
) -> None:
    builder, asking = OperationGraphBuilder(resources), OperationGraphBuilder(resources)
    for each in (builder, asking):
        add(each, operations)
    for delay_ns in delays_ns:
        asking.decision([asking.operation(delay_ns)])
    decider = AtTimes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "simulate_for", lambda _count: simulate)
        _, played = play_deciding(asking, decider)
        plain = play(builder.close())
    assert [each[: len(operations)] for each in times(played)] == list(times(plain))
    assert decider.asked_ns == sorted(set(delays_ns)), "decisions of one moment are asked for together"


@PLAYERS
@settings(deadline=None)
@given(
    drawn_operations(), drawn_resources(), st.integers(0, 40), st.integers(0, 5000) | st.integers(0, 10**6)
)
def test_what_is_added_at_a_time_is_played_as_if_it_had_waited_for_that_time(
    simulate: Player, operations: list[DrawnOperation], resources: Resources, early: int, time_ns: int
) -> None:
    whole, growing = OperationGraphBuilder(resources), OperationGraphBuilder(resources)
    then = whole.operation(after=[whole.operation(time_ns)])
    growing.decision([growing.operation(time_ns)])
    add(whole, operations[:early], 2)
    add(growing, operations[:early], 2)
    add(whole, operations[early:], 2, then)
    decider = AtTimes(lambda: add(growing, operations[early:], 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "simulate_for", lambda _count: simulate)
        graph, grown = play_deciding(growing, decider)
        plain = play(whole.close())
    assert len(graph) == 2 + len(operations)
    assert times(grown, 2) == times(plain, 2)


def test_what_has_not_begun_can_be_made_to_wait_for_what_is_added() -> None:
    builder = OperationGraphBuilder(1)
    first = builder.operation(10)
    decision = builder.decision([first])
    resume = builder.operation(5, after=[decision])
    many = builder.operation(100)
    late: list[int] = []

    def more() -> None:
        added = builder.operation(7, sender=0)
        builder.edge(added, resume)
        late.extend(builder.operation(1, after=[many]) for _ in range(9))  # more successors than a row holds

    graph, played = play_deciding(builder, AtTimes(more))
    assert played.end_ns[decision] == 10
    assert (played.start_ns[resume], played.end_ns[resume]) == (17, 22)
    assert played.start_ns[late].tolist() == [100] * 9
    assert graph.successors(many) == late


def test_a_graph_may_grow_without_end_until_a_time() -> None:
    builder = OperationGraphBuilder()
    ends: list[int] = []

    class Forever:
        def decide(self, now_ns: int, asked: Sequence[int]) -> Iterable[int]:
            ends.append(now_ns)
            builder.decision([builder.operation(10)])
            return asked

    builder.decision([builder.operation(10)])
    _, played = play_deciding(builder, Forever(), until_ns=1000)
    assert ends == list(range(10, 1000, 10))
    assert played.end_ns[-1] == NEVER_NS
    assert played.start_ns[-1] == 1000, "the decision at which the play ends"


def test_open_decisions_are_named() -> None:
    builder = OperationGraphBuilder()
    open_one = builder.decision([builder.operation(25)])
    builder.operation(3, after=[open_one])

    class Nobody:
        def decide(self, now_ns: int, asked: Sequence[int]) -> Iterable[int]:
            return ()

    with pytest.raises(
        DeadlockError, match="2 operations wait forever: open decisions 1 since 25 ns"
    ) as deadlock:
        play_deciding(builder, Nobody())
    assert deadlock.value.undecided == {open_one: 25}


def test_decisions_need_somebody_to_take_them() -> None:
    builder = OperationGraphBuilder()
    builder.decision()
    with pytest.raises(ValueError, match="has decisions but no decider"):
        play(builder.close())


def test_many_operations_and_queues_are_added_while_others_share_a_link() -> None:
    """Every array of the engine has to grow, with a flow in flight."""
    builder = OperationGraphBuilder(Resources.plain(2))
    builder.operation(10**6, sender=0, receiver=1)
    builder.decision([builder.operation(5)])
    added: list[int] = []

    def many() -> None:
        added.extend(builder.operation(1 + number % 7, sender=0, queue=number) for number in range(1, 3000))
        added.extend(builder.operation(9) for _ in range(3000))

    _, played = play_deciding(builder, AtTimes(many))
    assert (played.start_ns[added] == 5).all()
    assert played.end_ns[0] == 10**6 + sum(1 + number % 7 for number in range(1, 3000))
    assert WHOLE > 3000
