from __future__ import annotations

import pytest
from tests.planning.jobs import PlannedJob, layered_job, replayed_ns

from headway.bound import bound_of
from headway.collectives.selection import RINGS
from headway.job import Job
from headway.scheduling.buckets import (
    GATHER_MODES,
    BucketSchedule,
    GatherMode,
    forward_gather_order,
    make_buckets,
)
from headway.scheduling.fusion import cut
from headway.strategies.decoupled.planner.search import plan
from headway.strategies.decoupled.planner.surrogate import Predictor
from headway.strategies.decoupled.plugin import CAPS_BYTES
from headway.strategies.decoupled.policy import DecoupledStrategy, strategy_of

MIB = 2**20
EVEN = [MIB] * 24
# As in BERT: an embedding of a fifth of all bytes, first in forward and last in backward.
EMBEDDING = [6 * MIB] + [2**18, 2**18, MIB] * 16
SMALL = [30_000 + 1000 * index for index in range(60)]

# What local search reaches: the planned step over the dependency-aware bound.
JOBS: dict[str, tuple[PlannedJob, float]] = {
    "balanced": (layered_job(EVEN, communication=0.75), 1.03),
    "bound by communication": (layered_job(EVEN, communication=2.5, world_size=3), 1.02),
    "bound by computation": (layered_job(EVEN, communication=0.1), 1.04),
    "an embedding first in forward": (layered_job(EMBEDDING, communication=0.8, forward_ms=60), 1.04),
    "many small layers": (layered_job(SMALL, communication=0.6), 1.04),
    # Adding up within hosts first would send two thirds of what rings send between them.
    "two workers a host": (layered_job(EVEN, communication=0.7, workers_a_host=2), 1.25),
}


@pytest.fixture(scope="module", params=JOBS)
def case(request: pytest.FixtureRequest) -> tuple[PlannedJob, float]:
    return JOBS[request.param]


def fixed(cap_bytes: int, gather: GatherMode) -> DecoupledStrategy:
    return DecoupledStrategy(bucket_cap_bytes=cap_bytes, gather=gather)


def test_no_fixed_cap_is_better_and_the_bound_is_near(case: tuple[PlannedJob, float]) -> None:
    job, factor = case
    planned = plan(job.job)
    predictor = Predictor(job.model, job.profile, job.cluster)
    for form in GATHER_MODES:
        best = planned.best(form)
        caps = [fixed(cap, form).decide(Job.of(job.model)) for cap in CAPS_BYTES]
        assert best.step_ns <= 1.001 * min(predictor.predict(schedule) for schedule in caps)
        bound_ns = bound_of(job.job, form).step_ns
        assert bound_ns <= best.step_ns <= factor * bound_ns
        assert best.step_ns == pytest.approx(predictor.predict(best.schedule))


def test_what_is_predicted_is_what_full_replay_says(case: tuple[PlannedJob, float]) -> None:
    job, _ = case
    predictor = Predictor(job.model, job.profile, job.cluster)
    planned = plan(job.job, effort=100)
    schedules = [each.schedule for each in planned.schedules]
    schedules += [fixed(2 * MIB, form).decide(Job.of(job.model)) for form in GATHER_MODES]
    for schedule in schedules:
        assert predictor.predict(schedule) == pytest.approx(replayed_ns(job, schedule), rel=0.02)


@pytest.mark.parametrize("gather", GATHER_MODES)
@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_predictions_agree_with_replay_over_channels_and_ranks(
    gather: GatherMode, channels: int, world_size: int
) -> None:
    job = layered_job(EMBEDDING[:20], communication=0.9, world_size=max(2, world_size))
    cluster = job.cluster.resized(world_size)
    job = PlannedJob(job.model, job.profile, cluster)
    schedule = fixed(MIB, gather).model_copy(update={"channels": channels}).decide(Job.of(job.model))
    predicted = Predictor(job.model, job.profile, cluster).predict(schedule)
    assert predicted == pytest.approx(replayed_ns(job, schedule), rel=0.01)


@pytest.mark.parametrize("gather", GATHER_MODES)
def test_predictions_agree_with_replay_where_chunks_are_cut_into_pieces(gather: GatherMode) -> None:
    job = layered_job([12 * MIB] * 6, communication=0.9)
    schedule = fixed(12 * MIB, gather).decide(Job.of(job.model))
    assert {RINGS.select("all_gather", b.size_bytes, 4).pieces for b in schedule.buckets} == {1, 2}
    predicted = Predictor(job.model, job.profile, job.cluster).predict(schedule)
    assert predicted == pytest.approx(replayed_ns(job, schedule), rel=0.02)


@pytest.mark.parametrize("gather", GATHER_MODES)
def test_predictions_agree_with_replay_where_buckets_share_parameters(gather: GatherMode) -> None:
    job = layered_job(EMBEDDING, communication=0.9)
    parts = cut(job.model.ready_parameters(), 300_000)
    for stride in (
        1,
        3,
        7,
    ):  # of the last two, buckets hold the end of one parameter and the begin of the next
        groups = [parts[start : start + stride] for start in range(0, len(parts), stride)]
        buckets = make_buckets(groups, job.model)
        schedule = BucketSchedule(buckets, forward_gather_order(job.model, buckets), gather)
        assert len(schedule.units) < len(buckets)
        predicted = Predictor(job.model, job.profile, job.cluster).predict(schedule)
        assert predicted == pytest.approx(replayed_ns(job, schedule), rel=0.01)


def test_gathering_gradients_early_beats_what_overlap_alone_can() -> None:
    job = layered_job(EVEN, communication=0.75, latency_us=1.0, overhead_us=5.0, optimizer_ms=0.0)
    planned = plan(job.job, forms=["gradients"])
    assert planned.best().schedule.gathers_after
    profile = job.profile
    one_way_ns = 0.75 * profile.backward_ns
    apart_ns = max(profile.forward_ns, one_way_ns) + max(profile.backward_ns, one_way_ns)
    assert planned.best().step_ns < 0.95 * (apart_ns + profile.tail_ns + profile.rest_ns)


def test_planning_twice_gives_the_same_and_every_plan_can_be_written_down() -> None:
    job = layered_job(EMBEDDING, communication=0.8)
    first, second = (plan(job.job, effort=60) for _ in range(2))
    assert first == second
    for each in first.schedules:
        strategy = strategy_of(each.schedule, job.model)
        assert strategy.decide(Job.of(job.model)) == each.schedule
        assert strategy.describe()


def test_a_single_worker_and_a_model_of_one_parameter_are_planned_too() -> None:
    job = layered_job([4000], communication=0.5, world_size=2)
    alone = plan(job.job.moved_to(job.cluster.resized(1)))
    assert alone.best().step_ns >= job.profile.computation_ns
    assert plan(job.job).best().schedule.buckets
