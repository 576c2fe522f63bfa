"""Steps whose computation collectives slow down: predicted as they are replayed, and undone again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.planning.jobs import MS, PlannedJob, layered_job, replayed, replayed_ns
from tests.planning.test_conformance import Case, cases

from headway.graph.computation import Part
from headway.graph.step_layout import profile_of
from headway.scheduling import fusion
from headway.scheduling.buckets import BucketSchedule, GatherMode, forward_gather_order, make_buckets
from headway.strategies.decoupled.planner.surrogate import Predictor, Slowed, predict_disturbed, undisturbed

COMPUTED = (Part.FORWARD, Part.BACKWARD, Part.REST)


def slowed(job: PlannedJob, slowdown: float) -> PlannedJob:
    return replace(job, cluster=job.cluster.model_copy(update={"compute_slowdown": slowdown}))


def predictor_of(job: PlannedJob) -> Predictor:
    return Predictor(job.model, job.profile, job.cluster)


@pytest.mark.parametrize(
    ("computed_ns", "taken_ns"),
    [(0, 0), (10, 10), (14, 16), (20, 25), (25, 30), (30, 35), (40, 50), (60, 70)],
)
def test_computation_takes_longer_within_the_spans(computed_ns: float, taken_ns: float) -> None:
    slow = Slowed(((10, 25), (35, 50)), 0.5)
    assert slow.taken_ns(computed_ns) == taken_ns
    assert slow.computed_ns(taken_ns) == computed_ns


@given(
    lengths=st.lists(st.floats(0.1, 50), min_size=0, max_size=10),
    slowdown=st.floats(0, 4),
    computed_ns=st.floats(0, 300),
)
def test_what_is_slowed_down_is_undone(lengths: list[float], slowdown: float, computed_ns: float) -> None:
    edges = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    slow = Slowed(tuple(zip(edges[::2], edges[1::2], strict=False)), slowdown)
    taken_ns = slow.taken_ns(computed_ns)
    assert computed_ns - 1e-9 <= taken_ns <= computed_ns * (1 + slowdown) + 1e-9
    assert slow.computed_ns(taken_ns) == pytest.approx(computed_ns, abs=1e-9)


@settings(max_examples=examples(60), derandomize=True)
@given(case=cases(any_order=False), slowdown=st.floats(0.05, 0.8))
def test_a_disturbed_step_is_predicted_about_as_well_as_one_that_is_not(case: Case, slowdown: float) -> None:
    job, schedule = slowed(case.job, slowdown), case.schedule
    predicted, replayed = predict_disturbed(predictor_of(job), schedule), replayed_ns(job, schedule)
    error = predictor_of(case.job).predict(schedule) / replayed_ns(case.job, schedule) - 1
    assert predicted == pytest.approx(replayed, rel=abs(error) + 0.05)


def capped(job: PlannedJob, share: int, gather: GatherMode) -> BucketSchedule:
    buckets = make_buckets(fusion.fixed(job.model, job.model.size_bytes // share), job.model)
    return BucketSchedule(buckets, forward_gather_order(job.model, buckets), gather, 2)


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize(("communication", "optimizer_ms"), [(0.3, 1.0), (1.0, 1.0), (0.8, 25.0)])
def test_a_slowdown_shows_where_communication_is_hidden(
    gather: GatherMode, communication: float, optimizer_ms: float
) -> None:
    still = layered_job(
        [400_000] * 20, communication=communication, optimizer_ms=optimizer_ms, rest_ms=optimizer_ms
    )
    job, schedule = slowed(still, 0.3), capped(still, 10, gather)
    predicted, replayed = predict_disturbed(predictor_of(job), schedule), replayed_ns(job, schedule)
    assert predicted == pytest.approx(replayed, rel=0.02 + 0.02 * (optimizer_ms > 1))
    assert replayed > 1.03 * replayed_ns(still, schedule)
    assert predict_disturbed(predictor_of(still), schedule) == predictor_of(still).predict(schedule)


def seen_under(job: PlannedJob, schedule: BucketSchedule) -> PlannedJob:
    """``job`` with the profile that rank 0 shows in its third step of a replay."""
    graph, played = replayed(job, schedule)
    spans = [each for each in graph.spans if (each.rank, each.step) == (0, 2) and each.part in COMPUTED]
    took_ns = iter([int(played.end_ns[each.operation] - played.start_ns[each.operation]) for each in spans])
    timeline = job.profile.timeline(0, 2)
    items = [
        item._replace(duration_ns=next(took_ns)) if item.kind in COMPUTED else item for item in timeline.items
    ]
    assert next(took_ns, None) is None
    return replace(job, profile=profile_of({0: (replace(timeline, items=tuple(items)),)}))


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_what_was_seen_under_a_schedule_is_undisturbed_again(gather: GatherMode) -> None:
    """A profile as it is seen while a schedule is in force, found by hand, gives that which nothing disturbs."""
    still = layered_job([400_000] * 20, communication=0.5, optimizer_ms=1.0)
    job, schedule = slowed(still, 0.3), capped(still, 10, gather)
    seen = seen_under(job, schedule)
    assert seen.profile.computation_ns > 1.05 * still.profile.computation_ns
    found = undisturbed(predictor_of(seen), schedule)
    assert found.computation_ns == pytest.approx(still.profile.computation_ns, rel=0.01)
    for name, moment_ns in still.profile.ready_ns.items():
        assert found.ready_ns[name] == pytest.approx(moment_ns, abs=2 * MS)
    again_ns = predict_disturbed(predictor_of(replace(job, profile=found)), schedule)
    assert again_ns == pytest.approx(replayed_ns(job, schedule), rel=0.02)


def test_without_a_slowdown_what_was_seen_stays() -> None:
    job = layered_job([400_000] * 4)
    assert undisturbed(predictor_of(job), capped(job, 2, "parameters")) == job.profile
