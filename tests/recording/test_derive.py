from __future__ import annotations

from headway.recording.collectives import ObservedCollective
from headway.recording.derive import StrategySpan, collective_rows, wait_rows
from headway.trace.events import Event, Kind, Stream


def seen(
    sequence: int, enqueue_ns: int, end_ns: int, phase: str = "backward", asynchronous: bool = True
) -> ObservedCollective:
    return ObservedCollective("all_reduce", "0", sequence, 1000, 5, enqueue_ns, asynchronous, phase, end_ns)


def test_gloo_takes_up_a_collective_when_one_of_its_two_threads_is_free() -> None:
    rows = collective_rows([seen(0, 0, 100), seen(1, 10, 150), seen(2, 20, 180), seen(3, 200, 260)], [])
    assert [(row.start_ns, row.end_ns) for row in rows] == [(0, 100), (10, 150), (100, 180), (200, 260)]
    assert [row.bucket for row in rows] == [0, 1, 2, 3]


def test_a_collective_that_never_ended_is_left_out() -> None:
    assert collective_rows([seen(0, 0, 0)], []) == []


def test_only_all_reduces_of_a_backward_are_buckets() -> None:
    rows = collective_rows([seen(0, 0, 10, phase=""), seen(1, 20, 30)], [])
    assert [row.bucket for row in rows] == [-1, 0]


def test_the_wait_for_gradients_lasts_from_the_end_of_computation_to_the_last_bucket() -> None:
    observed = [seen(0, 0, 90), seen(1, 50, 180)]
    backward = Event(Kind.BACKWARD_PASS, "", Stream.COMPUTE, 5, 0, 200)
    waits = wait_rows([*collective_rows(observed, []), backward], observed, {200: 120}, [])
    assert [(w.kind, w.name, w.start_ns, w.end_ns) for w in waits] == [(Kind.WAIT, "gradients", 120, 180)]


def test_nobody_waits_for_buckets_that_were_done_in_time() -> None:
    observed = [seen(0, 0, 90)]
    backward = Event(Kind.BACKWARD_PASS, "", Stream.COMPUTE, 5, 0, 200)
    assert wait_rows([*collective_rows(observed, []), backward], observed, {200: 120}, []) == []


def test_a_blocking_collective_outside_backward_is_a_wait_and_an_asynchronous_one_is_not() -> None:
    observed = [seen(0, 10, 30, phase="", asynchronous=False), seen(1, 40, 60, phase="", asynchronous=True)]
    waits = wait_rows(collective_rows(observed, []), observed, {}, [])
    assert [(w.name, w.start_ns, w.end_ns) for w in waits] == [("all_reduce", 10, 30)]


def test_a_strategy_s_own_spans_become_events() -> None:
    spans = [
        StrategySpan(
            Kind.COLLECTIVE,
            "reduce_scatter",
            2,
            100,
            200,
            64,
            enqueue_ns=90,
            sequence=7,
            algorithm="native",
            step=5,
            strategy="somebody's",
        ),
        StrategySpan(Kind.WAIT, "all_gather", 2, 150, 160, step=6),
        StrategySpan(Kind.UPDATE, "bucket 2", 2, 160, 170, step=6),
    ]
    (row,) = collective_rows([], spans)
    assert (row.name, row.bucket, row.sequence, row.algorithm) == ("reduce_scatter", 2, 7, "native")
    assert row.group == "somebody's"
    assert [w.kind for w in wait_rows([], [], {}, spans)] == [Kind.WAIT, Kind.UPDATE]


def test_what_ranks_used_is_no_bucket_and_is_waited_for_with_the_buckets() -> None:
    uses = seen(1, 50, 180)
    uses.integers = True
    observed = [seen(0, 0, 90), uses]
    backward = Event(Kind.BACKWARD_PASS, "", Stream.COMPUTE, 5, 0, 200)
    rows = collective_rows(observed, [])
    assert [row.bucket for row in rows] == [0, -1]
    waits = wait_rows([*rows, backward], observed, {200: 120}, [])
    assert [(w.kind, w.name, w.start_ns, w.end_ns) for w in waits] == [(Kind.WAIT, "gradients", 120, 180)]
