from __future__ import annotations

import pytest
from tests.planning.jobs import PlannedJob, layered_job, replayed_ns

from headway.cluster import AlgorithmCost
from headway.collectives.selection import RINGS, Algorithms
from headway.planning.algorithm_choices import algorithm_choices
from headway.planning.planner import plan

SIZES = [40_000] * 12


def job_with(**overheads_us: float) -> PlannedJob:
    job = layered_job(SIZES, communication=0.8)
    costs = {name: AlgorithmCost(overhead_us=us) for name, us in overheads_us.items()}
    return PlannedJob(job.model, job.profile, job.cluster.model_copy(update={"algorithms": costs}))


def test_what_nobody_measured_is_not_chosen() -> None:
    assert algorithm_choices(job_with(ring=1e5).cluster, 10**6) == [RINGS]


def test_what_was_measured_joins_where_it_is_faster() -> None:
    faster = job_with(ring=400, native_all_gather=50, native_reduce_scatter=2000)
    assert algorithm_choices(faster.cluster, 10**6) == [RINGS, Algorithms(all_gather="native")]
    slower = job_with(ring=400, native_all_gather=500, native_reduce_scatter=2000)
    assert algorithm_choices(slower.cluster, 10**6) == [RINGS]


def test_the_plan_takes_the_faster_half_and_replay_agrees() -> None:
    job = job_with(ring=3000, native_all_gather=10)
    best = plan(job.job, effort=50).schedules[0]
    assert best.schedule.algorithms == Algorithms(all_gather="native")
    assert best.step_ns == pytest.approx(replayed_ns(job, best.schedule), rel=0.02)
