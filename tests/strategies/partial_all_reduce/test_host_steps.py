"""Hosts as workers in a simulation: against times computed by hand, and against DDP's own replay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from tests.models import layered_model

from headway.cluster import Cluster, Host
from headway.errors import PlanError, UnsupportedError
from headway.graph.computation import Computation, Item, Part, Point, Timeline
from headway.incidents import Incidents
from headway.job import Job
from headway.simulator.simulate import simulate
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.horizon import Outcome
from headway.strategies.partial_all_reduce import horizon
from headway.strategies.partial_all_reduce.horizon import cluster_of_hosts, hand_down_ns
from headway.strategies.partial_all_reduce.policy import PartialAllReduceStrategy
from headway.strategies.registry import plugin_named

PLUGIN = plugin_named("partial-all-reduce")
MODEL = layered_model(1, 250_000)
FORWARD_NS, BACKWARD_NS, UPDATE_NS = 1_000_000, 2_000_000, 500_000
LATENCY_US, LOCAL_LATENCY_US, LOCAL_GBPS, GBPS = 50.0, 10.0, 16.0, 4.0


def cluster(*workers: int, library: Literal["gloo", "nccl"] = "nccl") -> Cluster:
    hosts = tuple(
        Host(name=f"h{number}", workers=count, up_gbps=GBPS, down_gbps=GBPS)
        for number, count in enumerate(workers)
    )
    return Cluster(
        hosts=hosts, latency_us=LATENCY_US, local_gbps=LOCAL_GBPS, local_latency_us=LOCAL_LATENCY_US, library=library
    )  # fmt: skip


def timeline(rank: int, times: float = 1.0, *more: Item) -> Timeline:
    ready = [Item(Point.READY, parameter.name) for parameter in MODEL.ready_parameters()]
    items = (
        Item(Part.FORWARD, "", FORWARD_NS), Item(Part.BACKWARD, "", BACKWARD_NS), *ready, Item(Point.BACKWARD_END),
        *more, Item(Point.STEP), Item(Part.OPTIMIZER, "", UPDATE_NS),
    )  # fmt: skip
    return Timeline(rank, 0, items).scaled(times)


def job(on: Cluster, **times: float) -> Job:
    """Ranks take ``r1=2`` times as long as others."""
    timelines = {rank: (timeline(rank, times.get(f"r{rank}", 1.0)),) for rank in range(on.world_size)}
    return Job((MODEL,), on.world_size, on, Computation(timelines))


def simulated(of: Job, **options: Any) -> Outcome:
    found = PLUGIN.over_a_horizon(of, PartialAllReduceStrategy(within_hosts="all-reduce", **options))
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations are as long as they are computed to be."""
    monkeypatch.setattr(horizon, "JITTER", 0.0)


def ring_of_two_ns(gbps: float, latency_us: float) -> float:
    """Two messages of half of the model each way, one after the other."""
    return 2 * (latency_us * 1e3 + MODEL.size_bytes / 2 * 8 / gbps)


def period_ns(outcome: Outcome, rank: int = 0) -> float:
    lengths = np.diff(outcome.finished_ns[rank])
    assert np.ptp(lengths) <= 2, "every iteration is as long"
    return float(lengths.mean())


def test_an_iteration_is_a_step_of_ddp_an_average_over_hosts_and_a_broadcast() -> None:
    step_ns = FORWARD_NS + BACKWARD_NS + UPDATE_NS + ring_of_two_ns(LOCAL_GBPS, LOCAL_LATENCY_US)
    across_ns = ring_of_two_ns(GBPS, LATENCY_US) + 4 * LATENCY_US * 1e3  # ask, be granted, vote, be told
    handed_down_ns = LOCAL_LATENCY_US * 1e3 + MODEL.size_bytes * 8 / LOCAL_GBPS
    outcome = simulated(job(cluster(2, 2)), groups="all")
    assert period_ns(outcome) == pytest.approx(step_ns + across_ns + handed_down_ns, rel=1e-5)
    assert [len(each) for each in outcome.finished_ns] == [len(outcome.finished_ns[0])] * 4
    assert outcome.sizes.keys() == {2}, "groups are of hosts"
    standing_ns = across_ns + handed_down_ns + ring_of_two_ns(LOCAL_GBPS, LOCAL_LATENCY_US)
    assert outcome.standing_ns[3] == pytest.approx(outcome.iterations[3] * standing_ns, rel=0.03)
    fixed = simulated(job(cluster(2, 2)), groups="static")
    assert period_ns(fixed) == pytest.approx(
        step_ns + ring_of_two_ns(GBPS, LATENCY_US) + handed_down_ns, rel=1e-5
    )


def test_one_iteration_late_only_the_broadcast_is_seen() -> None:
    step_ns = FORWARD_NS + BACKWARD_NS + UPDATE_NS + ring_of_two_ns(LOCAL_GBPS, LOCAL_LATENCY_US)
    across_ns = ring_of_two_ns(GBPS, LATENCY_US) + 4 * LATENCY_US * 1e3
    assert across_ns < step_ns, "it is hidden"
    handed_down_ns = LOCAL_LATENCY_US * 1e3 + MODEL.size_bytes * 8 / LOCAL_GBPS
    outcome = simulated(job(cluster(2, 2)), groups="all", staleness=1)
    lengths = np.diff(outcome.finished_ns[0])
    assert lengths[1:].tolist() == pytest.approx([step_ns + handed_down_ns] * (len(lengths) - 1), rel=1e-5)


def test_a_hosts_steps_are_those_of_ddps_replay_on_its_own_links() -> None:
    of = job(cluster(3, 1, library="gloo"), r1=1.7)
    outcome = simulated(of, groups="static", staleness=1)
    own = cluster(3, library="gloo")
    alone = simulate(job(own, r1=1.7), DistributedDataParallelStrategy())
    groups = [each.end_ns - each.begin_ns for each in outcome.groups]
    assert max(groups) < alone.step_ms * 1e6
    handed_down_ns = hand_down_ns(own, MODEL.size_bytes)
    assert np.diff(outcome.finished_ns[0])[2:].tolist() == pytest.approx(
        [alone.step_ms * 1e6 + handed_down_ns] * (len(outcome.finished_ns[0]) - 3), rel=1e-3
    )


def test_handing_down_is_a_tree_under_gloo_and_a_pipe_under_nccl() -> None:
    size_bytes = 1_000_000
    (one_ns, two_ns, three_ns, eight_ns) = (
        hand_down_ns(cluster(n, library="gloo"), size_bytes) for n in (1, 2, 3, 8)
    )
    assert one_ns == 0
    message_ns = LOCAL_LATENCY_US * 1e3 + size_bytes * 8 / LOCAL_GBPS
    assert message_ns < two_ns
    assert 2 * message_ns < three_ns < 2 * two_ns
    assert 3 * message_ns < eight_ns < 3 * two_ns
    assert hand_down_ns(cluster(8), size_bytes) == hand_down_ns(cluster(2), size_bytes)


def test_a_script_that_averages_its_loss_does_not_bring_hosts_together() -> None:
    of = job(cluster(2, 2), r0=3.0)
    blocking = Item(Point.BLOCKING, "all_reduce", size_bytes=4)
    timelines = {rank: (timeline(rank, 3.0 if rank == 0 else 1.0, blocking),) for rank in range(4)}
    with_it = replace(of, computation=Computation(timelines))
    first, second = (simulated(each, groups="first-come", deadline_ms=0.1) for each in (of, with_it))
    assert first.finished_ns == second.finished_ns
    assert second.iterations[2] > 2 * second.iterations[0]
    assert second.iterations[0] == second.iterations[1], "ranks of a host are together"


def test_a_host_that_loses_a_rank_is_gone_and_nobody_joins() -> None:
    of = replace(job(cluster(2, 2, 2)), incidents=Incidents(deaths=((30_000_000, 3), (40_000_000, 2))))
    outcome = simulated(of, groups="first-come", group_size=2)
    assert max(outcome.finished_ns[2]) <= 30_000_000 < max(outcome.finished_ns[0])
    assert outcome.finished_ns[2] == outcome.finished_ns[3]
    joins = replace(of, incidents=Incidents(deaths=((5, 3),), joins=((9, 3),)))
    with pytest.raises(UnsupportedError, match="cannot join"):
        simulated(joins)


def test_a_host_is_slow_when_any_of_its_ranks_is() -> None:
    share = 0.2
    slow = replace(job(cluster(4, 4)), incidents=Incidents(slow_share=share, slow_factor=10.0))
    alone = replace(job(cluster(1, 1)), incidents=Incidents(slow_share=share, slow_factor=10.0))
    rates = [simulated(each, groups="static").iterations_per_s[0] for each in (slow, alone)]
    assert rates[0] < 0.75 * rates[1], "one of eight is slow in 83 % of steps, one of two in 36 %"


def test_the_plans_hosts_are_those_of_the_cluster_and_several() -> None:
    with pytest.raises(PlanError, match="do not match the cluster"):
        simulated(job(cluster(2, 2)), hosts=(3, 1))
    with pytest.raises(PlanError, match="all ranks are on one host"):
        simulated(job(cluster(4)))
    assert simulated(job(cluster(1))).total_per_s > 0


def test_hosts_share_cores_as_their_ranks_did() -> None:
    on = cluster(4, 4).model_copy(update={"shared_cores": 4})
    assert cluster_of_hosts(on).crowding == pytest.approx(on.crowding)
