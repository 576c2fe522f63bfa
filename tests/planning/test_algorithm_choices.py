from __future__ import annotations

import pytest
from tests.planning.jobs import PlannedJob, layered_job, replayed_ns

from headway.cluster import AlgorithmCost, Cluster
from headway.collectives.selection import RINGS, Algorithms
from headway.network import algorithm_choices as choices
from headway.network.link_cost import LinkCosts
from headway.scheduling.buckets import GATHER_MODES
from headway.strategies.decoupled.planner.search import plan
from headway.strategies.decoupled.planner.surrogate import Predictor
from headway.strategies.decoupled.policy import DecoupledStrategy

SIZES = [40_000] * 12


def algorithm_choices(cluster: Cluster, total_bytes: int) -> list[Algorithms]:
    return choices.algorithm_choices(LinkCosts(cluster), total_bytes)


def job_with(**overheads_us: float) -> PlannedJob:
    job = layered_job(SIZES, communication=0.8)
    costs = {name: AlgorithmCost(overhead_us=us) for name, us in overheads_us.items()}
    return PlannedJob(job.model, job.profile, job.cluster.model_copy(update={"algorithms": costs}))


def test_what_nobody_measured_is_not_chosen() -> None:
    assert algorithm_choices(job_with(ring=1e5).cluster, 10**6) == [RINGS]


def test_what_was_measured_joins_where_it_is_faster() -> None:
    faster = job_with(ring=4000, native_all_gather=50, native_reduce_scatter=20_000)
    assert algorithm_choices(faster.cluster, 10**6) == [RINGS, Algorithms(all_gather="native")]
    slower = job_with(ring=4000, native_all_gather=5000, native_reduce_scatter=20_000)
    assert algorithm_choices(slower.cluster, 10**6) == [RINGS]


@pytest.mark.parametrize(("name", "workers"), [("direct", 4), ("halving_doubling", 4), ("tree", 6)])
def test_others_of_our_own_join_only_where_they_were_measured(name: str, workers: int) -> None:
    def found(**costs: float) -> list[Algorithms]:
        return algorithm_choices(on_hosts(job_with(**costs), workers, 1).cluster, 10**6)

    assert found(ring=400) == [RINGS]
    assert Algorithms(name, name) in found(**{"ring": 20_000, name: 5})
    assert found(**{"ring": 50, name: 50_000}) == [RINGS]


def crossing_job() -> PlannedJob:
    """Bytes of direct collectives take half as long again, so that rings win large buckets."""
    job = layered_job([3000, 200_000] * 6, communication=0.8, world_size=8, latency_us=300)
    ring = job.cluster.cost_of("ring")
    costs = {**job.cluster.algorithms, "direct": ring.model_copy(update={"byte_factor": 1.5})}
    return PlannedJob(job.model, job.profile, job.cluster.model_copy(update={"algorithms": costs}))


def test_each_size_has_the_algorithm_that_is_the_fastest_for_it() -> None:
    cluster = crossing_job().cluster
    rings, chosen = algorithm_choices(cluster, 10**7)
    assert rings == RINGS
    (small,) = chosen.by_size
    assert (small.reduce_scatter, small.all_gather) == ("direct", "direct")
    assert (chosen.reduce_scatter, chosen.all_gather) == ("ring", "ring")
    costs = LinkCosts(cluster)
    for kind in choices.HALVES:
        for size_bytes, faster in ((small.size_bytes // 2, "direct"), (2 * small.size_bytes, "ring")):
            times_ns = {name: costs.of_half(name, kind).time_ns(size_bytes) for name in ("direct", "ring")}
            assert min(times_ns, key=times_ns.__getitem__) == faster
            assert chosen.of(kind, size_bytes) == faster
            assert costs.of(chosen).reduce_scatter.time_ns(size_bytes) == times_ns[faster]


def test_large_buckets_algorithm_may_be_that_of_all() -> None:
    job = on_hosts(layered_job(SIZES, communication=0.8, overhead_us=5000.0), 4, 4)
    ring = job.cluster.cost_of("ring")
    costs = {**job.cluster.algorithms, "direct": ring.model_copy(update={"overhead_us": 0.0})}
    found = algorithm_choices(job.cluster.model_copy(update={"algorithms": costs}), 10**6)
    assert found[0] == RINGS
    assert found[1].by_size
    assert found[2:] == [HIERARCHICAL]


def test_a_schedule_of_several_algorithms_is_predicted_as_it_is_replayed() -> None:
    job = crossing_job()
    chosen = algorithm_choices(job.cluster, job.model.size_bytes)[1]
    (small,) = chosen.by_size
    for gather in GATHER_MODES:
        for channels in (1, 2):
            strategy = DecoupledStrategy(
                bucket_cap_bytes=100_000, gather=gather, channels=channels, by_size=chosen.by_size
            )
            schedule = strategy.decide(job.job)
            sizes = [bucket.size_bytes for bucket in schedule.buckets]
            assert min(sizes) <= small.size_bytes < max(sizes)
            predicted_ns = Predictor(job.model, job.profile, job.cluster).predict(schedule)
            assert predicted_ns == pytest.approx(replayed_ns(job, schedule), rel=0.03)


def on_hosts(job: PlannedJob, hosts: int, workers: int, local_times: float = 20.0) -> PlannedJob:
    link = job.cluster.hosts[0]
    named = tuple(
        link.model_copy(update={"name": f"h{number}", "workers": workers}) for number in range(hosts)
    )
    changed = {"hosts": named, "local_gbps": link.up_gbps * local_times}
    return PlannedJob(job.model, job.profile, job.cluster.model_copy(update=changed))


HIERARCHICAL = Algorithms("hierarchical", "hierarchical")


def test_hierarchical_collectives_join_where_hosts_have_several_workers_and_memory_is_fast() -> None:
    job = layered_job(SIZES, communication=0.8)
    assert algorithm_choices(on_hosts(job, 4, 4).cluster, 10**6) == [RINGS, HIERARCHICAL]
    assert algorithm_choices(on_hosts(job, 4, 4, local_times=1.0).cluster, 10**9) == [RINGS]
    assert algorithm_choices(on_hosts(job, 16, 1).cluster, 10**6) == [RINGS]
    assert algorithm_choices(on_hosts(job, 1, 16).cluster, 10**6) == [RINGS]
    uneven = on_hosts(job, 4, 4).cluster
    first = uneven.hosts[0].model_copy(update={"workers": 3})
    assert algorithm_choices(uneven.model_copy(update={"hosts": (first, *uneven.hosts[1:])}), 10**6) == [
        RINGS
    ]
    assert algorithm_choices(on_hosts(job, 4, 4).cluster.model_copy(update={"library": "nccl"}), 10**6) == [
        RINGS
    ]


def test_the_plan_of_hosts_with_several_workers_is_hierarchical_and_replay_agrees() -> None:
    job = on_hosts(layered_job(SIZES, communication=0.8), 4, 4)
    planned = plan(job.job, effort=50)
    best = planned.schedules[0]
    assert best.schedule.algorithms == HIERARCHICAL
    assert best.step_ns == pytest.approx(replayed_ns(job, best.schedule), rel=0.05)
    rings = next(each.schedule for each in planned.schedules if each.schedule.algorithms == RINGS)
    assert replayed_ns(job, best.schedule) < replayed_ns(job, rings)


def test_the_plan_takes_the_faster_half_and_replay_agrees() -> None:
    job = job_with(ring=3000, native_all_gather=10)
    best = plan(job.job, effort=50).schedules[0]
    assert best.schedule.algorithms == Algorithms(all_gather="native")
    assert best.step_ns == pytest.approx(replayed_ns(job, best.schedule), rel=0.02)
