"""Pipelines as a strategy: what they decide, refuse, hold in memory and propose, and that they are played."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.models import layered_model
from tests.strategies.pipeline.test_layout import UNIT_NS, UNITS, a_cluster, timelines

from headway.errors import PlanError, UserError
from headway.graph.computation import Computation
from headway.job import Job
from headway.scheduling.pipeline.orders import (
    eager_one_forward_one_backward,
    gpipe,
    grouped,
    one_forward_one_backward,
)
from headway.simulator.simulate import simulate
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.pipeline.plugin import group_sizes, step_bound_ms
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.registry import plugin_named, plugin_of

MODEL = layered_model(3).model_copy(update={"activation_bytes": 10**6, "optimizer_state_bytes": 7})


def a_job(stages: int = 4, micro_batches: int = 16, latency: float = 0.0) -> Job:
    recorded = timelines(one_forward_one_backward(stages, micro_batches), dict(UNITS))
    return Job(
        stages=(MODEL,) * stages,
        world_size=stages,
        cluster=a_cluster(stages, latency=latency),
        computation=Computation({rank: tuple(own) for rank, own in enumerate(recorded)}),
        boundary_bytes=(1000,) * (stages - 1),
    )


def test_what_it_decides() -> None:
    job = a_job(4, 8)
    assert PipelineStrategy().decide(job) == one_forward_one_backward(4, 8)
    assert PipelineStrategy(order="gpipe").decide(job) == gpipe(4, 8)
    assert PipelineStrategy(order="eager-1f1b", micro_batches=3).decide(
        job
    ) == eager_one_forward_one_backward(4, 3)
    grouping = PipelineStrategy(order="kfkb", group_size=2)
    assert grouping.decide(job) == grouped(4, 8, 2)
    assert grouping.spelled_out(job).describe() == "pipeline, 2F2B, 8 micro-batches"
    assert PipelineStrategy(receive_buffers=5).decide(job).receive_buffers == 5


def test_what_it_refuses() -> None:
    job = a_job()
    for strategy, of, said in (
        (PipelineStrategy(micro_batches=2), Job.of(MODEL), "split into stages"),
        (
            PipelineStrategy(),
            Job((MODEL, MODEL), 2, boundary_bytes=(1,)),
            "number of micro-batches is unknown",
        ),
        (
            PipelineStrategy(order="kfkb", group_size=3, receive_buffers=2),
            job,
            "at least 3 for pipeline, 3F3B",
        ),
    ):
        with pytest.raises(PlanError, match=said):
            strategy.decide(of)
    with pytest.raises(ValueError, match="group_size is an option of the order kfkb"):
        PipelineStrategy(group_size=2)
    with pytest.raises(UserError, match="unsplit module as a pipeline"):
        plugin_named("pipeline").wrap(None, PipelineStrategy())  # type: ignore[arg-type]


def test_a_whole_model_cannot_be_trained_in_stages_nor_stages_as_a_whole() -> None:
    with pytest.raises(PlanError, match="split into 4 stages"):
        simulate(a_job(), DistributedDataParallelStrategy())


def test_it_is_played() -> None:
    """The closed form of a step where groups hide latency."""
    played = simulate(a_job(latency=1.0), PipelineStrategy(order="kfkb", group_size=2))
    assert played.step_ms * 1e6 / UNIT_NS == pytest.approx((16 + 4 - 1) * 3 + 2 * 3 * 1.0, rel=1e-3)


def test_a_rank_holds_the_activations_of_every_micro_batch_in_flight() -> None:
    job = a_job()
    peaks = {
        size: simulate(job, PipelineStrategy(order="kfkb", group_size=size)).peak_bytes for size in (1, 2, 3)
    }
    assert peaks[1] is not None
    assert peaks[2] is not None
    assert peaks[3] is not None
    # The first stage holds four more micro-batches a group size, and one more buffer for gradients.
    assert peaks[2] - peaks[1] == peaks[3] - peaks[2] == 4 * 10**6 + 1000


def test_what_it_proposes() -> None:
    assert group_sizes(8) == [2, 3, 4, 8]
    assert group_sizes(1) == []
    proposed = plugin_of(PipelineStrategy()).propose(a_job(4, 8)).strategies
    assert {each.describe() for each in proposed} == {
        f"pipeline, {order}, 8 micro-batches"
        for order in ("1F1B", "2F2B", "3F3B", "4F4B", "8F8B", "eager 1F1B", "zero bubble")
    }
    assert plugin_of(PipelineStrategy()).propose(Job.of(MODEL)).strategies == ()


def test_the_bound_is_a_mean_over_steps_and_binds() -> None:
    """Two equal stages: a rank's M (tf + tb); and one stage's first pass and last gradient before the second's own."""
    job = a_job(2, 4)
    assert step_bound_ms(job) == pytest.approx(4 * 3)
    disturbed = {
        rank: (
            *own,
            timelines(one_forward_one_backward(2, 4), {kind: 3 * u for kind, u in UNITS.items()})[rank][0],
        )
        for rank, own in job.steps.timelines.items()
    }
    assert step_bound_ms(replace(job, computation=Computation(disturbed))) == pytest.approx((12 + 36) / 2)
    faster = replace(job, computation=job.steps.scaled(0.5, {}))
    assert step_bound_ms(faster) == pytest.approx(6)
    for size in (1, 2, 4):
        strategy = PipelineStrategy(micro_batches=4, order="kfkb", group_size=size)
        for each in (job, faster):
            assert simulate(each, strategy).step_ms >= step_bound_ms(each)


def test_a_plan_that_follows_its_network_has_the_groups_that_fit() -> None:
    plugin = plugin_named("pipeline")
    fitting = [
        PipelineStrategy(order="eager-1f1b", micro_batches=8),
        PipelineStrategy(order="kfkb", group_size=4, micro_batches=8),
        PipelineStrategy(order="kfkb", group_size=2, micro_batches=8),
        PipelineStrategy(micro_batches=8),
        PipelineStrategy(order="gpipe", micro_batches=8),
    ]
    assert plugin.following(fitting[0], fitting) is None
    made = plugin.following(fitting[1], fitting)
    assert made is not None
    strategy, among = made
    assert strategy == PipelineStrategy(
        order="kfkb", group_size=4, group_sizes=(1, 2), other_orders=("eager-1f1b",), micro_batches=8
    )
    assert [each.describe() for each in among] == [fitting[at].describe() for at in (1, 3, 2, 0)]
    assert plugin_named("ddp").following(DistributedDataParallelStrategy(), fitting) is None
