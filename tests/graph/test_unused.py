"""Backwards that leave parameters without a gradient, and ranks that tell each other which (find_unused_parameters)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.models import layered_model

from headway.cluster import Cluster, Host
from headway.graph.build import GraphBuilder, PlacedCollective
from headway.graph.computation import Item, Part, Point, Timeline
from headway.graph.step_layout import lay_out_ranks
from headway.job import Job
from headway.scheduling.buckets import GatherMode
from headway.simulation.engine import PlayedTimes, play
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.parameter_server.policy import ParameterServerStrategy
from headway.strategies.registry import plugin_of

MODEL = layered_model(3).model_copy(update={"find_unused_parameters": True})
CAP_MB = 4100 / 2**20  # a layer's weight and bias, and a little
CLUSTER = Cluster(
    hosts=tuple(Host(name=f"h{i}", workers=1, up_gbps=1, down_gbps=1) for i in range(2)), latency_us=1
)


def backward(*unused: str) -> tuple[Item, ...]:
    """A step whose backward computes 10 us for each gradient."""
    items = [Item(Point.USE, "layer0"), *(Item(Point.UNUSED, name) for name in unused)]
    for name in MODEL.ready_order:
        if name not in unused:
            items += [Item(Part.BACKWARD, "", 10_000), Item(Point.READY, name)]
    return (*items, Item(Point.BACKWARD_END), Item(Point.STEP), Item(Part.OPTIMIZER, "", 6000))


def played(strategy: Strategy, *ranks: tuple[Item, ...]) -> tuple[GraphBuilder[Any], PlayedTimes]:
    graph = GraphBuilder(CLUSTER, strategy.decide(Job.of(MODEL)))
    timelines = [[Timeline(rank, step, items) for step in range(2)] for rank, items in enumerate(ranks)]
    lay_out_ranks(graph, plugin_of(strategy).reactions(graph, Job.of(MODEL), strategy), timelines)
    return graph, play(graph.close())


def exchanges(graph: GraphBuilder[Any]) -> list[PlacedCollective]:
    return [one for one in graph.collectives if one.bucket < 0]


def begin(schedule: PlayedTimes, collective: PlacedCollective, rank: int = 0) -> int:
    return int(schedule.end_ns[collective.begins[rank]])


def end(schedule: PlayedTimes, collective: PlacedCollective, rank: int = 0) -> int:
    return int(schedule.end_ns[collective.ends[rank]])


def test_ddp_keeps_the_buckets_of_registration_where_it_looks_for_unused_parameters() -> None:
    strategy = DistributedDataParallelStrategy(bucket_cap_mb=CAP_MB)
    kept, rebuilt = (
        [bucket.parameters for bucket in strategy.decide(Job.of(model)).buckets]
        for model in (MODEL, MODEL.model_copy(update={"find_unused_parameters": False}))
    )
    # The first three that are registered fill a bucket, which is the last to be reduced.
    assert kept == [
        ("layer1.bias", "layer2.weight", "layer2.bias"),
        ("layer0.weight", "layer0.bias", "layer1.weight"),
    ]
    assert kept != rebuilt


@pytest.mark.parametrize(
    "strategy",
    [DistributedDataParallelStrategy(bucket_cap_mb=CAP_MB), ParameterServerStrategy(bucket_cap_mb=CAP_MB)],
)
def test_ddp_adds_up_uses_behind_the_last_bucket_and_waits_for_them(strategy: Strategy) -> None:
    graph, schedule = played(strategy, backward(), backward())
    first, second = exchanges(graph)
    assert [(one.name, one.size_bytes, one.step) for one in (first, second)] == [
        ("all_reduce", 24, 0),
        ("all_reduce", 24, 1),
    ]
    assert first.selection.algorithm == "native"
    buckets = [one for one in graph.collectives if one.bucket >= 0 and one.step == 0]
    assert begin(schedule, first) >= max(begin(schedule, one) for one in buckets) == 60_000
    (waits,) = [s for s in graph.spans if s.rank == 0 and s.step == 0 and s.wait_name == "gradients"]
    last_ns = max(end(schedule, one) for one in (*buckets, first))
    assert schedule.start_ns[waits.operation] == last_ns
    assert schedule.end_ns[graph.boundaries[0][0]] == last_ns + 6000


def test_what_a_rank_does_not_use_is_ready_at_the_first_gradient_under_ddp() -> None:
    strategy = DistributedDataParallelStrategy(bucket_cap_mb=0)  # a bucket of every parameter
    graph, schedule = played(strategy, backward(), backward("layer2.bias", "layer2.weight"))
    by_bucket = {one.bucket: one for one in graph.collectives if one.step == 0}
    assert len(by_bucket) == 7
    asked = [[begin(schedule, by_bucket[index], rank) for index in range(2)] for rank in range(2)]
    assert asked == [[10_000, 20_000], [0, 0]]


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_decoupled_adds_up_uses_on_a_channel_behind_the_reduce_scatters(gather: GatherMode) -> None:
    strategy = DecoupledStrategy(bucket_cap_bytes=4100, gather=gather, channels=1)
    graph, schedule = played(strategy, backward(), backward("layer0.weight"))
    issued = [one.name for one in graph.collectives if one.step == 0]
    gathers = ["all_gather"] * 3
    between = [] if gather == "parameters" else gathers
    assert issued == ["reduce_scatter"] * 3 + between + ["all_reduce"] + ([] if between else gathers)
    (uses, _) = exchanges(graph)
    # Rank 1 takes part with zeros when its backward ends, 10 us before rank 0 has computed its last gradient.
    assert [begin(schedule, uses, rank) >= 60_000 - 10_000 * rank for rank in range(2)] == [True, True]
    if gather == "parameters":
        gathered = [one for one in graph.collectives if one.name == "all_gather" and one.step == 0]
        assert min(begin(schedule, one) for one in gathered) >= end(schedule, uses)
    else:
        (bucket,) = graph.schedule.buckets_of["layer0.weight"]
        asking = [
            [s for s in graph.spans if s.rank == rank and graph.collectives.index(uses) in s.waited_for]
            for rank in range(2)
        ]
        assert [[s.bucket for s in found] for found in asking] == [[], [bucket]]
