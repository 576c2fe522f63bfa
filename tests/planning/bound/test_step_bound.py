from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from tests.exhaustive import examples
from tests.planning.bound.drawn import MS, Drawn, drawn
from tests.planning.jobs import PlannedJob, layered_job

from headway.bound import Form, PlanBounds, bound_of, form_of, least_sent_share
from headway.bound.step_bound import COMPUTATION
from headway.cluster import Cluster, Host, Traffic
from headway.collectives.algorithms import HIERARCHICAL
from headway.graph.computation import Computation
from headway.graph.step_layout import StepProfile
from headway.job import Job
from headway.model import ModelSpec, ParameterSpec
from headway.scheduling.buckets import GATHER_MODES, BucketSchedule, GatherMode
from headway.simulator.simulate import simulate
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.parameter_server.policy import ParameterServerStrategy

ROUNDING, ROUNDING_NS = 1e-6, 1000  # a nanosecond a message
MANY = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, print_blob=True)


def check(case: Drawn, slack: float = ROUNDING) -> None:
    for form, strategy in case.plans:
        schedule = strategy.decide(case.job)
        assert isinstance(schedule, BucketSchedule)
        bound = bound_of(case.job, form, sent_share=least_sent_share(schedule))
        step_ms = simulate(case.job, strategy).step_ms
        rounded_ns = ROUNDING_NS + _uneven_ns(case.job, strategy)
        assert step_ms >= ((1 - slack) * bound.step_ns - rounded_ns) / 1e6, (
            f"{strategy!r} beats the bound: {bound.reason}"
        )
        assert form_of(schedule) == form
        own = PlanBounds(case.job).of(schedule)
        assert own.step_ns >= bound.step_ns * (1 - slack)
        least_ms = ((1 - slack) * own.step_ns - rounded_ns) / 1e6
        assert step_ms >= least_ms, f"{strategy!r} beats its own bound: {own.reason}"


def _uneven_ns(job: Job, strategy: Strategy) -> float:
    """What a byte a message takes: by that may what a folded rank sends be less than what its likes do."""
    cluster, schedule = job.on, strategy.decide(job)
    assert isinstance(schedule, BucketSchedule)
    slowest_gbps = min(
        cluster.local_gbps, *(gbps for h in cluster.hosts for gbps in (h.up_gbps, h.down_gbps))
    )
    return len(schedule.buckets) * 4 * cluster.world_size * 8 / slowest_gbps


@settings(MANY, max_examples=examples(60))
@given(drawn())
def test_nothing_is_replayed_in_less(case: Drawn) -> None:
    check(case)


@settings(MANY, max_examples=examples(30))
@given(drawn(ranks_differ=True))
def test_nothing_is_replayed_in_less_on_ranks_that_differ(case: Drawn) -> None:
    check(case)


@settings(MANY, max_examples=examples(30))
@given(drawn(steps_differ=True))
def test_nothing_is_replayed_in_less_where_steps_differ(case: Drawn) -> None:
    check(case)


@pytest.mark.exhaustive
@settings(MANY, max_examples=500)
@given(drawn(steps_differ=True))
def test_nothing_of_thousands_is_replayed_in_less_where_steps_differ(case: Drawn) -> None:
    check(case)


@pytest.mark.exhaustive
@settings(MANY, max_examples=1500)
@given(drawn())
def test_nothing_of_thousands_is_replayed_in_less(case: Drawn) -> None:
    check(case)


@pytest.mark.exhaustive
@settings(MANY, max_examples=500)
@given(drawn(ranks_differ=True))
def test_nothing_of_thousands_is_replayed_in_less_on_ranks_that_differ(case: Drawn) -> None:
    check(case)


NUMEL, GBPS = 2_500_000, 1.0
ONE_WAY_MS = NUMEL * 4 * 8e-6 / GBPS  # all bytes over one link


def one_parameter(
    workers: int,
    *,
    computation_ms: tuple[float, float] = (10.0, 20.0),
    workers_a_host: int = 1,
    steps: int = 3,
    **cluster: object,
) -> Job:
    """A job whose gradients are complete when backward ends; it computes a forward, a backward, a rest of 1 ms."""
    hosts = tuple(
        Host(name=f"host{index}", workers=workers_a_host, up_gbps=GBPS, down_gbps=GBPS)
        for index in range(workers // workers_a_host)
    )
    model = ModelSpec(
        parameters=(ParameterSpec(name="w", shape=(NUMEL,), dtype="float32", module="m"),),
        forward_order=("m",), ready_order=("w",),
    )  # fmt: skip
    forward_ns, backward_ns = (round(each * MS) for each in computation_ms)
    profile = StepProfile(forward_ns, backward_ns, {"m": 0}, {"w": backward_ns}, rest_ns=MS)
    timelines = {0: tuple(profile.timeline(0, step) for step in range(steps))}
    on = Cluster.model_validate({"hosts": hosts, "latency_us": 0.0, "local_latency_us": 0.0, **cluster})
    return Job((model,), workers, on, Computation(timelines))


DDP = DistributedDataParallelStrategy(bucket_cap_mb=100.0)
SERVERS = ParameterServerStrategy(bucket_cap_mb=100.0, channels=1)


@pytest.mark.parametrize("strategy", [DDP, SERVERS], ids=["ring", "servers"])
@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_the_bound_is_what_a_single_bucket_takes(
    workers: int, strategy: DistributedDataParallelStrategy | ParameterServerStrategy
) -> None:
    job = one_parameter(workers)
    bound = bound_of(job, "all-reduce")
    assert bound.step_ms == pytest.approx(31 + 2 * (workers - 1) / workers * ONE_WAY_MS)
    assert simulate(job, strategy).step_ms == pytest.approx(bound.step_ms, rel=0.01)
    assert bound.binds.startswith("the link")
    assert bound.binds in bound.reason


@pytest.mark.parametrize("workers", [2, 4])
def test_the_bound_is_what_a_single_bucket_takes_inside_a_host(workers: int) -> None:
    job = one_parameter(workers, workers_a_host=workers, local_gbps=GBPS)
    bound = bound_of(job, "all-reduce")
    assert bound.step_ms == pytest.approx(31 + 2 * (workers - 1) / workers * ONE_WAY_MS)
    assert simulate(job, DDP).step_ms == pytest.approx(bound.step_ms, rel=0.01)
    assert bound.binds == "the memory and links of all workers"


@pytest.mark.parametrize(
    ("form", "strategy"),
    [
        ("all-reduce", DistributedDataParallelStrategy(bucket_cap_mb=1.0)),
        ("gradients", DecoupledStrategy(gather="gradients")),
        ("parameters", DecoupledStrategy(gather="parameters")),
    ],
)
def test_the_bound_is_what_computation_takes_where_bytes_pass_beneath_it(
    form: Form, strategy: Strategy
) -> None:
    job = layered_job([2**20] * 24, communication=0.01, latency_us=0.0, overhead_us=0.0).job
    bound = bound_of(job, form)
    assert bound.parts_ns[COMPUTATION] == pytest.approx(bound.step_ns, rel=0.01)
    assert simulate(job, strategy).step_ms == pytest.approx(bound.step_ms, rel=0.01)


@pytest.mark.parametrize("gather", GATHER_MODES)
def test_the_bound_is_what_a_decoupled_bucket_takes(gather: GatherMode) -> None:
    job = one_parameter(4)
    bound = bound_of(job, gather)
    assert bound.step_ms == pytest.approx(30 + 1.5 * ONE_WAY_MS)  # the rest is over before forward needs it
    assert simulate(job, DecoupledStrategy(gather=gather)).step_ms == pytest.approx(bound.step_ms, rel=0.01)


@pytest.mark.parametrize("gather", GATHER_MODES)
def test_the_bound_is_what_a_hierarchical_bucket_takes(gather: GatherMode) -> None:
    """Within hosts, where bytes take no time, gradients are reduced before they leave: flat rings send more."""
    job = one_parameter(8, workers_a_host=4, local_gbps=1e4)
    named: dict[str, Any] = {"reduce_scatter": HIERARCHICAL, "all_gather": HIERARCHICAL}
    bound = bound_of(job, gather)
    assert bound.step_ms == pytest.approx(30 + ONE_WAY_MS)
    assert simulate(job, DecoupledStrategy(gather=gather, **named)).step_ms == pytest.approx(
        bound.step_ms, rel=0.01
    )


def test_a_slow_link_binds() -> None:
    job = one_parameter(2)
    slow = job.on.hosts[1].model_copy(update={"down_gbps": GBPS / 3})
    job = job.moved_to(job.on.model_copy(update={"hosts": (job.on.hosts[0], slow)}))
    bound = bound_of(job, "all-reduce")
    assert bound.binds == "the link to host host1"
    assert bound.step_ms == pytest.approx(31 + 3 * ONE_WAY_MS)
    assert simulate(job, DDP).step_ms == pytest.approx(bound.step_ms, rel=0.01)


def test_a_link_that_others_use_carries_what_they_leave() -> None:
    others = Traffic(source="host0", target="host1", gbps=0.6 * GBPS, connections=1)
    job = one_parameter(2, traffic=(others,))
    bound = bound_of(job, "all-reduce")
    assert bound.step_ms == pytest.approx(31 + ONE_WAY_MS / 0.5)
    assert simulate(job, DDP).step_ms == pytest.approx(bound.step_ms, rel=0.01)


def test_a_burst_is_ahead_by_what_the_link_saved_while_it_was_idle() -> None:
    saved_ms = 8.0  # of 31 in which it is idle
    job = one_parameter(2, burst_bytes=round(saved_ms * GBPS / 8e-6))
    bound = bound_of(job, "all-reduce")
    assert bound.step_ms == pytest.approx(31 + ONE_WAY_MS - saved_ms)
    assert simulate(job, DDP).step_ms == pytest.approx(bound.step_ms, rel=0.01)


def test_a_burst_that_is_never_saved_again_is_spent_once() -> None:
    job = one_parameter(2, burst_bytes=10 * NUMEL * 4, computation_ms=(1.0, 2.0), steps=100)
    bound, lasting = bound_of(job, "all-reduce"), bound_of(job, "all-reduce", steps=math.inf)
    assert lasting.step_ms == pytest.approx(ONE_WAY_MS)
    assert bound.step_ms == pytest.approx(0.9 * ONE_WAY_MS)
    assert bound.step_ms <= simulate(job, DDP).step_ms <= 1.1 * bound.step_ms


def test_gradients_are_a_latency_on_the_way() -> None:
    job = one_parameter(2, latency_us=50_000.0).moved_to(
        one_parameter(2, latency_us=50_000.0).on.scaled(bandwidth=1e5)
    )
    bound = bound_of(job, "all-reduce")
    assert bound.step_ms == pytest.approx(31 + 50, rel=1e-3)


def test_computation_takes_as_long_as_the_job_says() -> None:
    job = one_parameter(4)
    twice = replace(job, computation=job.steps.scaled(1.0, {2: 2.0}))
    fast = twice.moved_to(job.on.scaled(bandwidth=1e5))
    assert bound_of(fast, "all-reduce", steps=math.inf).step_ms == pytest.approx(62, rel=1e-3)
    assert bound_of(fast, "all-reduce").step_ms == pytest.approx(62 * 2 / 3, rel=1e-3)  # of three steps
    assert simulate(fast, DDP).step_ms == pytest.approx(62, rel=1e-3)
    half = replace(job, computation=job.steps.scaled(0.5, {}))
    assert bound_of(half, "all-reduce").step_ms == pytest.approx(15.5 + 1.5 * ONE_WAY_MS)


def test_a_single_worker_only_computes() -> None:
    job = one_parameter(2)
    alone = job.moved_to(job.on.resized(1))
    assert bound_of(alone, "all-reduce").parts_ns == {COMPUTATION: 31 * MS}


def test_fewer_bits_are_another_bound() -> None:
    job = one_parameter(2)
    assert bound_of(job, "all-reduce", sent_share=0.5).step_ms == pytest.approx(31 + 0.5 * ONE_WAY_MS)


def test_a_hierarchy_would_send_less_than_a_flat_ring() -> None:
    job = one_parameter(8, workers_a_host=4, local_gbps=1000.0)
    assert bound_of(job, "all-reduce").step_ms == pytest.approx(31 + ONE_WAY_MS)
    assert simulate(job, DDP).step_ms == pytest.approx(31 + 1.75 * ONE_WAY_MS, rel=0.02)


def test_the_distance_and_its_reason_are_said() -> None:
    bound = bound_of(one_parameter(4), "all-reduce")
    said = bound.distance(2 * bound.step_ms)
    assert said.startswith(f"{2 * bound.step_ms:.1f} ms is 100% above the bound of {bound.step_ms:.1f} ms. ")
    assert bound.reason in said
    assert bound.reason.startswith("By this recording, no plan can be faster, as ")
    assert bound.scaled(0.5).step_ns == bound.step_ns / 2
    assert bound.scaled(0.5).binds == bound.binds


def test_the_bound_counts_what_cannot_overlap() -> None:
    planned: PlannedJob = layered_job([2**20] * 24, communication=0.0001)
    profile = planned.profile
    # All but the last module's bytes pass under computation; what optimizers take overlaps it, or not.
    assert bound_of(planned.job, "parameters").step_ns == pytest.approx(profile.computation_ns, rel=1e-3)
    whole_ns = profile.computation_ns + profile.optimizer_ns
    assert bound_of(planned.job, "gradients").step_ns == pytest.approx(whole_ns, rel=1e-3)
    assert bound_of(planned.job, "all-reduce").step_ns == pytest.approx(whole_ns, rel=1e-3)
