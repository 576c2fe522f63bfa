from __future__ import annotations

import pytest
from tests.replay.test_replayer import as_bucketed, cluster_of, job
from tests.synthetic import synthetic_trace

from headway.replay.replayer import Replayer


def test_computation_slows_down_by_the_share_that_communication_covers() -> None:
    one = job(forward_ms=10, backward_ms=100, gbps=1.0)
    trace, links = as_bucketed(synthetic_trace(one)), cluster_of(one)
    calm = Replayer(trace, links)
    disturbed = Replayer(trace, links.model_copy(update={"compute_slowdown": 0.5}))
    # The record already holds the slowness it was made with, so replaying it as it was changes little ...
    assert disturbed.replay().step_ms == pytest.approx(calm.replay().step_ms, rel=0.03)
    # ... but what computation would take alone is less.
    alone = sum(item.duration_ns for item in disturbed.timelines[0][0].items)
    recorded = sum(item.duration_ns for item in calm.timelines[0][0].items)
    assert alone < recorded


def test_nothing_overlaps_nothing_slows_down() -> None:
    one = job(world_size=1)
    trace, links = as_bucketed(synthetic_trace(one)), cluster_of(one)
    disturbed = Replayer(trace, links.model_copy(update={"compute_slowdown": 0.5}))
    assert disturbed.replay().step_ms == pytest.approx(Replayer(trace, links).replay().step_ms, rel=1e-9)
