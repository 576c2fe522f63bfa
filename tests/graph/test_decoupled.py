from __future__ import annotations

import itertools

import pytest
from tests.models import layered_model

from headway.cluster import (
    COPY_MIB,
    RUNTIME_BACKWARD,
    RUNTIME_FORWARD,
    RUNTIME_STEP,
    AlgorithmCost,
    Cluster,
    Host,
)
from headway.graph.build import GraphBuilder
from headway.graph.computation import Item, Part, Point, Timeline
from headway.graph.step_layout import lay_out_ranks
from headway.job import Job
from headway.model import ModelSpec
from headway.scheduling.buckets import BucketSchedule, GatherMode
from headway.simulation.engine import PlayedTimes, play
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.decoupled.reactions import Reactions

MODEL = layered_model(2)
BACKWARD = [*(Item(Point.READY, name) for name in MODEL.ready_order), Item(Point.BACKWARD_END)]
STEP = [Item(Point.STEP), Item(Part.OPTIMIZER, duration_ns=1000)]


def walked(*items: Item) -> GraphBuilder[BucketSchedule]:
    """Two ranks that walk twice over ``items`` under one bucket a layer."""
    cluster = Cluster(hosts=tuple(Host(name=f"h{i}", workers=1, up_gbps=1, down_gbps=1) for i in range(2)))
    graph = GraphBuilder(
        cluster,
        DecoupledStrategy(bucket_cap_bytes=5000, gather="gradients", channels=1).decide(Job.of(MODEL)),
    )
    timelines = [[Timeline(rank, step, items) for step in range(2)] for rank in range(2)]
    lay_out_ranks(graph, Reactions(graph, Job.of(MODEL)), timelines)
    return graph


def settled(graph: GraphBuilder[BucketSchedule], step: int) -> list[tuple[int, bool]]:
    """The buckets rank 0 waited for in ``step``, and whether each was updated then."""
    durations = graph.close().duration_ns
    return [
        (s.bucket, bool(durations[s.operation]))
        for s in graph.spans
        if s.rank == 0 and s.step == step and s.wait_name == "parameters"
    ]


def test_forward_settles_what_it_uses_and_the_first_gradient_settles_the_rest() -> None:
    graph = walked(Item(Point.USE, "layer0"), *BACKWARD, *STEP)
    assert len(graph.schedule.buckets) == 2
    (first,) = graph.schedule.buckets_of["layer0.weight"]
    assert settled(graph, 0) == []
    assert settled(graph, 1) == [(first, True), (1 - first, True)]
    after = [s for s in graph.spans if s.rank == 0 and s.step == 1 and s.wait_name]
    scatters = [c for c in graph.collectives if c.name == "reduce_scatter" and c.step == 1]
    assert len(after) == len(scatters) == 2


def test_a_second_backward_waits_for_gradients_and_updates_nothing() -> None:
    graph = walked(*BACKWARD, Item(Point.USE, "layer0"), *BACKWARD, *STEP)
    assert settled(graph, 0) == [(index, False) for index in graph.schedule.gather_order]
    due = [(index, True) for index in graph.schedule.gather_order]
    assert settled(graph, 1) == due + settled(graph, 0)


def played(
    items: list[Item], strategy: DecoupledStrategy, model: ModelSpec = MODEL, **algorithms: AlgorithmCost
) -> tuple[GraphBuilder[BucketSchedule], PlayedTimes]:
    """Two ranks that walk three times over ``items``, played; links carry 1 Gb/s, a message takes 1 us."""
    hosts = tuple(Host(name=f"h{i}", workers=1, up_gbps=1, down_gbps=1) for i in range(2))
    graph = GraphBuilder(
        Cluster(hosts=hosts, latency_us=1, algorithms=algorithms), strategy.decide(Job.of(model))
    )
    timelines = [[Timeline(rank, step, tuple(items)) for step in range(3)] for rank in range(2)]
    lay_out_ranks(graph, Reactions(graph, Job.of(model)), timelines)
    return graph, play(graph.close())


def spans(
    graph: GraphBuilder[BucketSchedule], schedule: PlayedTimes, name: str, step: int
) -> dict[int, tuple[int, int]]:
    """For each bucket, when rank 0 began and ended its collective ``name`` of ``step``."""
    return {
        c.bucket: (int(schedule.end_ns[c.begins[0]]), int(schedule.end_ns[c.ends[0]]))
        for c in graph.collectives
        if c.name == name and c.step == step
    }


FORWARD = [Item(Point.USE, "layer0"), Item(Part.FORWARD, "", 50_000), Item(Point.USE, "layer1")]
PARAMETERS = DecoupledStrategy(bucket_cap_bytes=5000, gather="parameters", channels=1)


def test_parameters_are_gathered_after_the_step_and_the_update_of_the_own_share() -> None:
    items = [*FORWARD, Item(Part.BACKWARD, "", 100_000), *BACKWARD, *STEP]
    graph, schedule = played(items, PARAMETERS, deferred_update=AlgorithmCost(overhead_us=3.0))
    step_ns = schedule.end_ns[graph.boundaries[1][0]]
    gathers, scatters = (spans(graph, schedule, name, 1) for name in ("all_gather", "reduce_scatter"))
    assert all(begin >= step_ns for begin, _ in gathers.values())
    assert all(begin >= scatters[index][1] for index, (begin, _) in gathers.items())
    updates = [work for work in graph.works if work.rank == 0 and work.step == 1]
    assert [work.bucket for work in updates] == list(graph.schedule.gather_order)
    lengths = [int(schedule.end_ns[w.operation] - schedule.start_ns[w.operation]) for w in updates]
    # 1000 ns over two buckets and two ranks, and what a bucket costs by itself.
    assert lengths == pytest.approx([3000 + 250, 3000 + 250], abs=5)
    # Updates have a thread of their own: one begins when the one before it is done, under the gather of that.
    first, second = graph.schedule.gather_order
    begun, ended = schedule.start_ns[updates[1].operation], schedule.end_ns[updates[1].operation]
    assert begun == schedule.end_ns[updates[0].operation]
    assert ended < gathers[first][1]
    assert gathers[second][0] == max(ended, gathers[first][1])


def test_the_main_thread_pays_the_call_of_step_and_no_update_where_parameters_are_gathered() -> None:
    items = [*FORWARD, *BACKWARD, *STEP]
    graph, schedule = played(items, PARAMETERS, step_call=AlgorithmCost(overhead_us=7.0))
    own = [s for s in graph.spans if s.rank == 0 and s.part == Part.OPTIMIZER]
    lengths = {int(schedule.end_ns[s.operation] - schedule.start_ns[s.operation]) for s in own}
    assert lengths == {0, 7000}
    waited = [s for s in own if s.step == 2 and s.wait_name == "parameters"]
    assert [s.bucket for s in waited] == list(graph.schedule.gather_order)


def test_the_runtime_s_own_work_on_the_main_thread_counts() -> None:
    costs = {
        name: AlgorithmCost(overhead_us=us)
        for name, us in (
            (RUNTIME_FORWARD, 1.0),
            (RUNTIME_BACKWARD, 2.0),
            (RUNTIME_STEP, 3.0),
            (COPY_MIB, 2**20 / 1000),
        )
    }
    items = [*FORWARD, *BACKWARD, *STEP]
    for gather in ("parameters", "gradients"):
        strategy = PARAMETERS.model_copy(update={"gather": gather})
        graph, schedule = played(items, strategy, MODEL, **costs)
        own = [s for s in graph.spans if s.rank == 0 and s.step == 1]
        lengths = {
            part: [
                int(schedule.end_ns[s.operation] - schedule.start_ns[s.operation])
                for s in own
                if s.part == part
            ]
            for part in (Part.BACKWARD, Part.OPTIMIZER)
        }
        # Each of two buckets is settled under forward; four parameters are stepped.
        sizes = [sum(graph.schedule.buckets[i].size_bytes for i in unit) for unit in graph.schedule.units]
        parameters = [
            len(graph.schedule.buckets[i].parameters) for unit in graph.schedule.units for i in unit
        ]
        copies = [size if gather == "parameters" else 0 for size in sizes]
        updates = [0 if gather == "parameters" else round(1000 * size / sum(sizes)) for size in sizes]
        settled = [
            1000 * n + copied + update for n, copied, update in zip(parameters, copies, updates, strict=True)
        ]
        assert sorted(lengths[Part.OPTIMIZER]) == sorted([*settled, 4 * 3000])
        assert sum(lengths[Part.BACKWARD]) == 4 * 2000


def test_a_second_backward_without_a_step_reduces_again_and_gathers_no_parameters() -> None:
    graph, _ = played([*BACKWARD, *BACKWARD, *STEP], PARAMETERS)
    names = [c.name for c in graph.collectives if c.step == 1]
    assert names == ["reduce_scatter"] * 4 + ["all_gather"] * 2
    stretches = [s for s in graph.spans if s.rank == 0 and s.step == 1 and s.wait_name]
    assert [s.wait_name for s in stretches] == ["parameters", "parameters", "gradients"]
    assert len(stretches[-1].waited_for) == 2


@pytest.mark.parametrize("gather", ["gradients", "parameters"])
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_a_channel_serves_its_jobs_in_order_one_at_a_time(gather: GatherMode, channels: int) -> None:
    model = layered_model(6)
    strategy = DecoupledStrategy(bucket_cap_bytes=4100, gather=gather, channels=channels)
    ready = [Item(Point.READY, name) for name in model.ready_order]
    items = [Item(Part.BACKWARD, "", 10_000), *ready, Item(Point.BACKWARD_END), *STEP]
    graph, schedule = played(items, strategy, model)
    jobs = [
        (int(schedule.end_ns[c.begins[0]]), int(schedule.end_ns[c.ends[0]]))
        for c in graph.collectives  # in the order of their submission
    ]
    for number, (begin, _) in enumerate(jobs[channels:], start=channels):
        assert begin >= jobs[number - channels][1]
    edges = sorted([(begin, 1) for begin, _ in jobs] + [(end, -1) for _, end in jobs])
    at_once = list(itertools.accumulate(change for _, change in edges))
    assert max(at_once) == channels


def test_gradients_may_be_gathered_behind_their_reduction() -> None:
    model = layered_model(3)
    strategy = DecoupledStrategy(bucket_cap_bytes=4100, gather="gradients", channels=1).spelled_out(
        Job.of(model)
    )
    count = len(strategy.buckets)
    early = strategy.model_copy(update={"gathers_after": (count - 1,) * (count - 1) + (0,)})
    assert early.gather_order[-1] == 0
    graph, _ = played([Item(Point.READY, name) for name in model.ready_order] + STEP, early, model)
    issued = [(c.name, c.bucket) for c in graph.collectives if c.step == 0]
    assert issued[:2] == [("reduce_scatter", 0), ("all_gather", 0)]
    assert [b for name, b in issued if name == "all_gather"] == [0, *early.gather_order[:-1]]


def test_a_bucket_of_parts_goes_when_every_parameter_in_it_is_ready() -> None:
    buckets = (
        ("layer1.bias", "layer1.weight[0:600]"),
        ("layer1.weight[600:1000]", "layer0.bias", "layer0.weight"),
    )
    ready = [Item(Point.READY, name) for name in MODEL.ready_order]
    gap = Item(Part.BACKWARD, "", 10_000)
    items = [part for item in ready for part in (gap, item)]
    graph, schedule = played(
        [*items, Item(Point.BACKWARD_END), *STEP],
        DecoupledStrategy(buckets=buckets, gather="gradients", channels=1),
    )
    scatters = spans(graph, schedule, "reduce_scatter", 0)
    assert [begin for begin, _ in scatters.values()] == [20_000, 40_000]
    waits = [s for s in graph.spans if s.rank == 0 and s.step == 1 and s.wait_name]
    # The buckets share a parameter, so they are settled together, for one update.
    assert graph.schedule.units == ((0, 1),)
    assert [(s.bucket, len(s.waited_for)) for s in waits] == [(0, 2)]
    lengths = [int(schedule.end_ns[s.operation] - schedule.start_ns[s.operation]) for s in waits]
    assert lengths == [1000]


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_several_optimizers_work_once_whichever_of_their_calls_comes_last(gather: GatherMode) -> None:
    """A recorded step ends with one optimizer's call, so that it may begin with another's."""
    strategy = DecoupledStrategy(bucket_cap_bytes=5000, gather=gather, channels=1)
    computing = [*FORWARD, Item(Part.BACKWARD, "", 100_000), *BACKWARD]
    work = Item(Part.OPTIMIZER, "", 40_000)
    lengths = []
    for items in (
        [*computing, Item(Point.STEP), work],
        [Item(Point.STEP), work, *computing, Item(Point.STEP)],
    ):
        graph, schedule = played(items, strategy)
        first, last = (int(schedule.end_ns[graph.boundaries[step][0]]) for step in (1, 2))
        lengths.append(last - first)
    assert lengths[1] == pytest.approx(lengths[0], rel=0.02)
