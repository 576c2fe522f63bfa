"""What must hold of every replayed graph, whatever it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulation.graphs import DrawnOperation, drawn_operations, graph_of

from headway.simulation.engine import play

Operations = list[DrawnOperation]
FINE = 10**6  # nanoseconds to which times are rounded are as good as nothing next to it


def in_queues_of_their_own(operations: Operations) -> Operations:
    """Nothing stands behind anything: a nanosecond more or less lets nobody pass."""
    return [replace(one, queue=number) for number, one in enumerate(operations)]


def slower(operations: Operations, factor: int) -> Operations:
    """As many times the durations and latencies: computation so much slower, links of so much less bandwidth."""
    return [
        replace(one, duration_ns=one.duration_ns * factor, latency_ns=one.latency_ns * factor)
        for one in operations
    ]


@settings(deadline=None)
@given(drawn_operations().map(in_queues_of_their_own), st.integers(2, 50))
def test_times_scale_with_durations(operations: Operations, factor: int) -> None:
    fine = slower(operations, FINE)
    ends, scaled = play(graph_of(fine)).end_ns, play(graph_of(slower(fine, factor))).end_ns
    assert scaled == pytest.approx(factor * ends, rel=1e-6, abs=factor * len(operations))


@settings(deadline=None)
@given(drawn_operations())
def test_two_replays_are_identical(operations: Operations) -> None:
    graph = graph_of(operations)
    first, again, anew = play(graph), play(graph), play(graph_of(operations))
    for other in (again, anew):
        assert np.array_equal(first.start_ns, other.start_ns)
        assert np.array_equal(first.end_ns, other.end_ns)


@settings(deadline=None)
@given(drawn_operations(), st.data())
def test_less_work_is_never_slower_where_nothing_is_shared(
    operations: Operations, data: st.DataObject
) -> None:
    """Where links are shared it may be: what comes earlier may get in the way of what everybody waits for."""
    free = [replace(one, sender=-1, receiver=-1) for one in operations]
    number = data.draw(st.integers(0, len(free) - 1))
    without = [*free]
    without[number] = replace(free[number], duration_ns=0, latency_ns=0, after=())
    assert (play(graph_of(without)).end_ns <= play(graph_of(free)).end_ns).all()


@settings(deadline=None)
@given(drawn_operations())
def test_nothing_begins_before_what_it_waits_for_is_done(operations: Operations) -> None:
    played = play(graph_of(operations))
    for number, one in enumerate(operations):
        assert all(played.end_ns[before] <= played.start_ns[number] for before in one.after)
        assert played.end_ns[number] >= played.start_ns[number] + one.duration_ns + one.latency_ns


@settings(deadline=None)
@given(drawn_operations())
def test_no_link_carries_more_than_it_can(operations: Operations) -> None:
    played = play(graph_of(operations))
    for resource in range(5):
        own = [n for n, one in enumerate(operations) if resource in (one.sender, one.receiver)]
        if own:
            busy_ns = sum(operations[number].duration_ns for number in own)
            begin, end = min(played.start_ns[own]), max(played.end_ns[own])
            assert busy_ns <= end - begin + len(own)
