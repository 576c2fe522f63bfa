from __future__ import annotations

from tests.models import layered_model

from headway.cluster import Cluster, Host
from headway.graph.build import GraphBuilder, walk_timelines
from headway.graph.timeline import Item, Part, Point, Timeline
from headway.strategies.data_parallel.decoupled.dataflow import Dataflow
from headway.strategies.data_parallel.decoupled.policy import DecoupledStrategy

MODEL = layered_model(2)
BACKWARD = [*(Item(Point.READY, name) for name in MODEL.ready_order), Item(Point.BACKWARD_END)]
STEP = [Item(Point.STEP), Item(Part.OPTIMIZER, duration_ns=1000)]


def walked(*items: Item) -> GraphBuilder:
    """Two ranks that walk twice over ``items`` under one bucket a layer."""
    cluster = Cluster(hosts=tuple(Host(name=f"h{i}", workers=1, up_gbps=1, down_gbps=1) for i in range(2)))
    graph = GraphBuilder(cluster, MODEL, DecoupledStrategy(bucket_cap_bytes=5000).decide(MODEL))
    timelines = [[Timeline(rank, step, items) for step in range(2)] for rank in range(2)]
    walk_timelines(graph, Dataflow(graph), timelines)
    return graph


def settled(graph: GraphBuilder, step: int) -> list[tuple[int, bool]]:
    """The buckets rank 0 waited for in ``step``, and whether each was updated then."""
    durations = graph.close().duration_ns
    return [
        (s.bucket, bool(durations[s.operation]))
        for s in graph.stretches
        if s.rank == 0 and s.step == step and s.wait_name == "parameters"
    ]


def test_forward_settles_what_it_uses_and_the_first_gradient_settles_the_rest() -> None:
    graph = walked(Item(Point.USE, "layer0"), *BACKWARD, *STEP)
    assert len(graph.schedule.buckets) == 2
    (first,) = graph.schedule.buckets_of["layer0.weight"]
    assert settled(graph, 0) == []
    assert settled(graph, 1) == [(first, True), (1 - first, True)]
    after = [s for s in graph.stretches if s.rank == 0 and s.step == 1 and s.wait_name]
    scatters = [c for c in graph.collectives if c.name == "reduce_scatter" and c.step == 1]
    assert len(after) == len(scatters) == 2


def test_a_second_backward_waits_for_gradients_and_updates_nothing() -> None:
    graph = walked(*BACKWARD, Item(Point.USE, "layer0"), *BACKWARD, *STEP)
    assert settled(graph, 0) == [(index, False) for index in graph.schedule.gather_order]
    due = [(index, True) for index in graph.schedule.gather_order]
    assert settled(graph, 1) == due + settled(graph, 0)
