from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.synthetic import SyntheticJob, events_of, synthetic_trace, trace_of

from headway.graph.computation import Part, Point, Timeline
from headway.graph.recorded import timelines_of
from headway.trace.events import Event, Events, Kind, Stream

PARTS = {Part.INPUT, Part.FORWARD, Part.BACKWARD, Part.FINALIZE, Part.OPTIMIZER, Part.REST}

jobs = st.builds(
    SyntheticJob,
    world_size=st.integers(1, 4),
    steps=st.integers(1, 3),
    forward_ms=st.floats(0.5, 20),
    backward_ms=st.floats(0.5, 20),
    gbps=st.floats(0.5, 50),
    blocking_loss=st.booleans(),
    jitter=st.floats(0, 0.2),
)


@settings(max_examples=examples(30), deadline=None)
@given(job=jobs)
def test_computation_and_waits_add_up_to_the_step(job: SyntheticJob) -> None:
    trace = synthetic_trace(job)
    for rank, timelines in timelines_of(trace).items():
        for timeline in timelines:
            rows = list(trace.events[rank].of_step(timeline.step))
            (step,) = [row for row in rows if row.kind == Kind.STEP]
            waited_ns = sum(row.duration_ns for row in rows if row.kind == Kind.WAIT)
            computed_ns = sum(item.duration_ns for item in timeline.items)
            assert computed_ns + waited_ns == pytest.approx(step.duration_ns, abs=10)


def test_points_stand_in_the_order_of_the_step() -> None:
    trace = synthetic_trace(SyntheticJob(world_size=2, steps=2, blocking_loss=True))
    items = timelines_of(trace)[0][0].items
    points = [item for item in items if item.kind not in PARTS]
    assert [p.name for p in points if p.kind == Point.READY] == list(trace.model.ready_order)
    kinds = [p.kind for p in points]
    assert kinds.index(Point.BLOCKING) < kinds.index(Point.READY) < kinds.index(Point.BACKWARD_END)
    assert kinds.index(Point.BACKWARD_END) < kinds.index(Point.STEP)


def test_scaling_spares_the_wait_for_input() -> None:
    timeline = timelines_of(synthetic_trace(SyntheticJob(world_size=1)))[0][0]
    halved = timeline.scaled(0.5)
    for before, after in zip(timeline.items, halved.items, strict=True):
        expected = before.duration_ns if before.kind == Part.INPUT else before.duration_ns / 2
        assert after.duration_ns == pytest.approx(expected, abs=1)


def test_a_backward_that_synchronises_nothing_readies_nothing() -> None:
    """Two backward passes of one step, of which only the second launches collectives (no_sync)."""
    ranks = events_of(SyntheticJob(world_size=2, steps=1))
    name = next(row.name for row in ranks[0] if row.kind == Kind.GRADIENT_READY)
    for rows in ranks.values():
        step = next(row for row in rows if row.kind == Kind.STEP)
        rows.append(Event(Kind.BACKWARD_PASS, "", "compute", step.step, step.start_ns, 1000))
        rows.append(Event(Kind.GRADIENT_READY, name, "compute", step.step, step.start_ns + 500, 0))
    (timeline,) = timelines_of(trace_of(ranks))[0]
    assert [item.name for item in timeline.items if item.kind == Point.READY].count(name) == 1


def test_updates_off_the_main_thread_take_nothing_of_it_and_count_for_every_rank() -> None:
    ranks = events_of(SyntheticJob(world_size=2, steps=1))
    (before,) = timelines_of(trace_of(ranks))[0]
    for rows in ranks.values():
        start_ns = rows[0].start_ns
        rows.append(Event(Kind.UPDATE, "bucket 0", Stream.COMMUNICATION, 0, start_ns, 1000, bucket=0))
    (after,) = timelines_of(trace_of(ranks))[0]
    assert after.items == before.items
    assert before.optimizer_ns > 0
    assert after.optimizer_ns == 2 * 1000 / 2  # the other half counts as what every update costs


def test_values_taken_over_from_updates_off_the_main_thread_are_part_of_forward() -> None:
    ranks = events_of(SyntheticJob(world_size=2, steps=1))
    for rows in ranks.values():
        forward = next(row for row in rows if row.kind == Kind.FORWARD_PASS)
        rows.append(Event(Kind.UPDATE, "bucket 0", Stream.COMPUTE, 0, forward.start_ns, 1000, bucket=0))
    (deferred,) = timelines_of(trace_of(ranks))[0]
    for rows in ranks.values():
        rows.append(Event(Kind.UPDATE, "bucket 0", Stream.COMMUNICATION, 0, rows[0].start_ns, 700, bucket=0))
    (in_background,) = timelines_of(trace_of(ranks))[0]

    def total_ns(timeline: Timeline, part: str) -> int:
        return sum(item.duration_ns for item in timeline.items if item.kind == part)

    assert total_ns(in_background, Part.FORWARD) == total_ns(deferred, Part.FORWARD) + 1000
    assert total_ns(in_background, Part.OPTIMIZER) == total_ns(deferred, Part.OPTIMIZER) - 1000


def test_points_of_a_stage_are_those_of_its_own_model() -> None:
    """Stages may have modules of the same names, and others that the first stage lacks."""
    trace = synthetic_trace(SyntheticJob(world_size=2, steps=1))
    order = trace.model.forward_order
    fewer = trace.model.model_copy(update={"forward_order": order[:1]})
    second = Events.from_rows([row._replace(stage=1) for row in trace.events[1]])
    staged = replace(trace, stages=(fewer, trace.model), model=fewer, events={0: trace.events[0], 1: second})
    used = {
        rank: [item.name for item in timeline.items if item.kind == Point.USE]
        for rank, (timeline,) in timelines_of(staged).items()
    }
    assert used == {0: [order[0]], 1: list(order)}
