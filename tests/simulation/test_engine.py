from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulation import reference_engine
from tests.simulation.graphs import DrawnOperation, drawn_operations, drawn_resources, graph_of

from headway.simulation import engine, kernel
from headway.simulation.building import WHOLE, OperationGraphBuilder, Resources
from headway.simulation.engine import play


def test_an_operation_waits_for_all_before_it() -> None:
    builder = OperationGraphBuilder()
    a, b = builder.operation(10), builder.operation(25)
    c = builder.operation(5, after=[a, b])
    schedule = play(builder.close())
    assert schedule.start_ns[c] == 25
    assert schedule.end_ns[c] == 30


def test_a_link_carries_one_message_at_a_time_and_latency_does_not_occupy_it() -> None:
    builder = OperationGraphBuilder(resources=2)
    first = builder.operation(10, latency_ns=100, sender=0, receiver=1)
    second = builder.operation(10, latency_ns=100, sender=0, receiver=1)
    schedule = play(builder.close())
    assert schedule.end_ns[first] == 110
    assert schedule.start_ns[second] == 10
    assert schedule.end_ns[second] == 120


def test_connections_share_a_link_evenly() -> None:
    builder = OperationGraphBuilder(resources=3)
    long = builder.operation(100, sender=0, receiver=1, queue=1)
    short = builder.operation(20, sender=0, receiver=2, queue=2)
    behind = builder.operation(10, latency_ns=5, sender=0, receiver=1, queue=1)
    schedule = play(builder.close())
    assert schedule.start_ns[long] == schedule.start_ns[short] == 0
    assert schedule.end_ns[short] == 40  # both at half of the rate
    assert schedule.end_ns[long] == 120  # and this one alone from then on
    assert schedule.start_ns[behind] == 120
    assert schedule.end_ns[behind] == 135


def test_the_scarcer_side_of_a_message_sets_its_rate_and_leaves_the_rest_to_others() -> None:
    builder = OperationGraphBuilder(resources=4)
    builder.operation(30, sender=0, receiver=3, queue=0)
    builder.operation(30, sender=1, receiver=3, queue=1)
    builder.operation(30, sender=2, receiver=3, queue=2)
    late = builder.operation(10)
    other = builder.operation(30, after=[late], sender=0, queue=3)
    schedule = play(builder.close())
    assert schedule.end_ns[:3].tolist() == [90, 90, 90]
    assert schedule.end_ns[other] == 55  # the first one leaves it two thirds of the sender's side


def test_both_directions_of_a_link_are_free_of_each_other() -> None:
    builder = OperationGraphBuilder(resources=4)
    builder.operation(10, sender=0, receiver=3)
    builder.operation(10, sender=2, receiver=1)
    assert play(builder.close()).end_ns.max() == 10


def test_what_others_catch_up_with_is_not_saved_for_a_burst_too() -> None:
    half, burst_ns, window_ns, rounds = WHOLE // 2, 100, 1000, 100
    resources = Resources(
        np.full(2, WHOLE), np.full(2, burst_ns), np.array([[0, 0, half, half]]), np.full(2, window_ns)
    )
    builder = OperationGraphBuilder(resources=resources)
    last = builder.operation()
    for _ in range(rounds):
        pause = builder.operation(100, after=[last])
        last = builder.operation(100, after=[pause], sender=0, receiver=1)
    # Others have half of the link: what gets ahead of them, or is let through at once, is so once.
    assert play(builder.close()).end_ns[last] >= 2 * (100 * rounds - burst_ns - window_ns)


def test_a_cycle_is_an_error() -> None:
    builder = OperationGraphBuilder()
    a = builder.operation(1)
    b = builder.operation(1, after=[a])
    builder.edge(b, a)
    with pytest.raises(ValueError, match="cycle"):
        play(builder.close())


def test_an_empty_graph_is_over_at_once() -> None:
    assert len(play(OperationGraphBuilder().close()).end_ns) == 0


@given(
    durations=st.lists(st.integers(0, 1000), min_size=1, max_size=40),
    edges=st.lists(st.tuples(st.integers(0, 39), st.integers(0, 39)), max_size=80),
)
def test_without_resources_the_engine_finds_the_longest_path(
    durations: list[int], edges: list[tuple[int, int]]
) -> None:
    builder = OperationGraphBuilder()
    count = len(durations)
    for duration in durations:
        builder.operation(duration)
    kept = sorted({(a, b) for a, b in edges if a < b < count})
    for before, after in kept:
        builder.edge(before, after)
    ends = np.zeros(count, dtype=np.int64)
    for number in range(count):
        ends[number] = durations[number] + max((ends[a] for a, b in kept if b == number), default=0)
    assert (play(builder.close()).end_ns == ends).all()


@pytest.mark.parametrize("simulate", [kernel.simulate, engine._compiled()], ids=["plain", "compiled"])
@settings(deadline=None)
@given(drawn_operations(least_asked=0.1), drawn_resources() | st.none())
def test_the_engine_plays_by_the_rules_that_the_reference_spells_out(
    simulate: Callable[..., kernel.PlayState], operations: list[DrawnOperation], resources: Resources | None
) -> None:
    graph = graph_of(operations, resources)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "simulate_for", lambda _count: simulate)
        schedule = play(graph)
    expected = reference_engine.play(graph)
    assert schedule.start_ns.tolist() == expected.start_ns.tolist()
    assert schedule.end_ns.tolist() == expected.end_ns.tolist()


def test_times_that_are_out_of_range_are_an_error() -> None:
    for duration_ns in (2**61, 2**59):
        builder = OperationGraphBuilder(1)
        before: list[int] = []
        for _ in range(4):
            before = [builder.operation(duration_ns, after=before, sender=0)]
        with pytest.raises(OverflowError):
            play(builder.close())
