"""What pipelines propose where none of the known orders fits, and what becomes of a recorded order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.models import layered_model
from torch import nn

from headway.cluster import Cluster, Host
from headway.errors import PlanError
from headway.graph.computation import Computation, Item, Part, Timeline
from headway.job import Job
from headway.strategies.pipeline.plugin import PLUGIN, pipelined
from headway.strategies.pipeline.policy import PipelineStrategy

MS = 1_000_000
V_SHAPE = {0: (0, 3), 1: (1, 2)}  # two stages a rank, of which the first and the last are on one


def v_shaped() -> Job:
    hosts = tuple(Host(name=f"h{rank}", workers=1, up_gbps=1.0, down_gbps=1.0) for rank in V_SHAPE)
    timelines = {}
    for rank, stages in V_SHAPE.items():
        forwards = [Item(Part.FORWARD, duration_ns=10 * MS, stage=stage, micro_batch=0) for stage in stages]
        backwards = [
            Item(Part.BACKWARD, duration_ns=20 * MS, stage=stage, micro_batch=0) for stage in reversed(stages)
        ]
        timelines[rank] = (Timeline(rank, 0, (*forwards, *backwards)),)
    return Job(
        (layered_model(),) * 4, 2, Cluster(hosts=hosts, latency_us=1.0), Computation(timelines),
        boundary_bytes=(8, 8, 8),
    )  # fmt: skip


def test_stages_in_a_v_have_a_bound_though_no_order_is_proposed() -> None:
    made = PLUGIN.propose(v_shaped())
    assert not made.strategies
    assert made.bound_ms == pytest.approx(60.0)


def test_a_recorded_order_is_left_to_the_script() -> None:
    steps: Any = SimpleNamespace()  # nothing of it is looked at
    PLUGIN.schedule_injection.take_over(steps, PipelineStrategy(order="recorded"))


def test_a_model_that_is_cut_needs_an_order() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PlanError, match="does not name an order"):
        pipelined(model, optimizer, PipelineStrategy(order="recorded"), None)
