"""Asynchronous servers' shards, what a rank holds, and a job of them over a time."""

from __future__ import annotations

import re
import threading

import pytest
import torch
from tests.models import layered_model
from torch import nn

from headway.cluster import Cluster, Host
from headway.errors import UnsupportedError
from headway.graph.build import GraphBuilder
from headway.graph.computation import Computation, Item, Part, Point, Timeline
from headway.job import Job
from headway.scheduling.buckets import Part as BucketPart
from headway_baselines.asynchronous_servers.checks import check_parameters
from headway_baselines.asynchronous_servers.horizon import over_a_horizon, staleness_of
from headway_baselines.asynchronous_servers.plugin import PLUGIN
from headway_baselines.asynchronous_servers.policy import AsynchronousServersStrategy
from headway_baselines.asynchronous_servers.shard import Shard

STEP_NS, UPDATE_NS = 10_000_000, 1_000_000


def job(world_size: int, factors: dict[int, float] | None = None) -> Job:
    hosts = tuple(Host(name=f"h{i}", workers=1, up_gbps=10, down_gbps=10) for i in range(world_size))
    items = (Item(Part.FORWARD, "", STEP_NS), Item(Point.STEP), Item(Part.OPTIMIZER, "", UPDATE_NS))
    computation = Computation({0: (Timeline(0, 0, items),)}).scaled(1.0, factors or {})
    return Job((layered_model(3),), world_size, Cluster(hosts=hosts), computation)


@pytest.mark.parametrize("count", [1, 2, 5, 64, 5000])
def test_shards_are_even_and_whole(count: int) -> None:
    model = layered_model(3)
    schedule = AsynchronousServersStrategy().decide(Job.of(model, count))
    assert len(schedule.shards) == count
    assert sum(schedule.sizes_bytes) == model.size_bytes
    assert max(schedule.sizes_bytes) - min(schedule.sizes_bytes) <= 8
    ends = dict.fromkeys(model.by_name, 0)
    for parts in schedule.shards:
        for part in parts:
            assert part.start == ends[part.parameter] < part.end
            ends[part.parameter] = part.end
    assert [4 * end for end in ends.values()] == [p.size_bytes for p in model.parameters]


def outcome_of(of: Job, staleness: int | None = None):  # type: ignore[no-untyped-def]
    return over_a_horizon(of, AsynchronousServersStrategy(staleness=staleness).decide(of))


def test_a_straggler_holds_nobody_up_without_a_bound() -> None:
    equal, slow = outcome_of(job(4)), outcome_of(job(4, {3: 4.0}))
    fast = slow.iterations_per_s[0]
    assert fast == pytest.approx(equal.iterations_per_s[0], rel=0.1)
    assert 3 < fast / slow.iterations_per_s[3] < 4
    assert slow.staleness[1] > equal.staleness[1]
    assert equal.staleness[0] == pytest.approx(3, abs=0.5), "everybody else's, once"
    assert "updates by others" in slow.describe()
    assert slow.to_document()["spread"] is None


def test_with_a_bound_ranks_go_at_the_pace_of_the_slowest() -> None:
    bounded = outcome_of(job(4, {3: 4.0}), staleness=2)
    assert max(bounded.iterations) - min(bounded.iterations) <= 3
    assert bounded.standing_ns[0] > 2 * bounded.standing_ns[3]
    assert outcome_of(job(4), staleness=0).step_ms == pytest.approx(outcome_of(job(4)).step_ms, rel=0.05)


def test_a_rank_alone_waits_for_its_own_update_only() -> None:
    outcome = outcome_of(job(1))
    assert outcome.step_ms == pytest.approx((STEP_NS + UPDATE_NS) / 1e6, rel=0.02)
    assert outcome.staleness == (0.0, 0)


def test_staleness_counts_others_updates_in_between() -> None:
    updated = {(0, 0): [10, 40, 50], (1, 0): [20, 30, 60]}
    assert staleness_of(updated, 0, 100) == ((2 + 0 + 0 + 2) / 4, 2)


def test_no_steps_are_laid_out_and_a_share_is_held() -> None:
    of, strategy = job(4), AsynchronousServersStrategy()
    schedule = strategy.decide(of)
    with pytest.raises(UnsupportedError, match="DDP"):
        PLUGIN.reactions(GraphBuilder(of.on, schedule), of, strategy)
    assert PLUGIN.propose(of).strategies == ()
    assert PLUGIN.footprint(of, schedule, 0).updated_share == 0.25


def test_workers_that_neither_push_nor_leave_are_waited_for_no_longer() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    shard = Shard([BucketPart("weight", 0, 2)], {"weight": weight}, 3, None)
    shard.left(0)
    with pytest.raises(
        TimeoutError, match=re.escape("ranks that have not left (1, 2) none pushed for 0.01 s")
    ):
        shard.await_everyone_left(0.01)
    shard.left(1)
    threading.Timer(0.02, shard.left, (2,)).start()
    shard.await_everyone_left(60)


def test_sparse_gradients_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 1))
    with pytest.raises(UnsupportedError, match="sparse gradients are not supported; got 0, with sparse=True"):
        check_parameters(model)
