from __future__ import annotations

import pytest
from tests.replayer.test_replayer import as_bucketed, cluster_of, job
from tests.synthetic import synthetic_trace

from headway.cluster import Cluster, PassSlowdown
from headway.replayer.replayer import Replayer
from headway.strategies.base import Strategy
from headway.strategies.decoupled.policy import DecoupledStrategy


def test_computation_slows_down_by_the_share_that_communication_covers() -> None:
    one = job(forward_ms=10, backward_ms=100, gbps=1.0)
    trace, links = as_bucketed(synthetic_trace(one)), cluster_of(one)
    calm = Replayer(trace, links)
    disturbed = Replayer(trace, links.model_copy(update={"compute_slowdown": 0.5}))
    # The record already holds the slowness it was made with, so replaying it as it was changes little ...
    assert disturbed.replay().step_ms == pytest.approx(calm.replay().step_ms, rel=0.03)
    # ... but what computation would take alone is less.
    alone = sum(item.duration_ns for item in disturbed.job.steps.timelines[0][0].items)
    recorded = sum(item.duration_ns for item in calm.job.steps.timelines[0][0].items)
    assert alone < recorded


def test_nothing_overlaps_nothing_slows_down() -> None:
    one = job(world_size=1)
    trace, links = as_bucketed(synthetic_trace(one)), cluster_of(one)
    disturbed = Replayer(trace, links.model_copy(update={"compute_slowdown": 0.5}))
    assert disturbed.replay().step_ms == pytest.approx(Replayer(trace, links).replay().step_ms, rel=1e-9)


def test_the_decoupled_all_reduce_slows_down_the_passes_that_it_communicates_under() -> None:
    one = job(forward_ms=40, backward_ms=100, gbps=0.02)  # links are in use throughout
    trace, links = as_bucketed(synthetic_trace(one)), cluster_of(one)
    slower = links.model_copy(update={"decoupled_slowdown": PassSlowdown(forward=0.5, backward=0.25)})
    plan = DecoupledStrategy(bucket_cap_bytes=2**20)

    def computed_ms(cluster: Cluster, strategy: Strategy | None) -> float:
        result = Replayer(trace, cluster).replay(strategy)
        return result.step_ms - result.waiting_ms

    assert computed_ms(slower, None) == pytest.approx(computed_ms(links, None), rel=1e-6)
    more_ms = computed_ms(slower, plan) - computed_ms(links, plan)
    all_of_it_ms = (
        0.5 * 40 + 0.25 * 100
    )  # but nothing is in flight before the first bucket, nor after the last
    assert 0.5 * all_of_it_ms < more_ms < all_of_it_ms
