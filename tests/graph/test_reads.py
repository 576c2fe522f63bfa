"""What strategies do where a script reads gradients between backward and step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from tests.models import layered_model

from headway.cluster import Cluster, Host
from headway.graph.build import ComputeSpan, GraphBuilder
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
from headway.trace.events import Read

MODEL = layered_model(2)
CLUSTER = Cluster(
    hosts=tuple(Host(name=f"h{i}", workers=1, up_gbps=1, down_gbps=1) for i in range(2)), latency_us=1
)
READ_NS, UPDATE_NS, COPY_NS = 4000, 8000, 500
HALF_NS = (2 * 4040 // 2) * 8  # of all gradients, over a link of 1 Gb/s


def step(read: Item | None) -> tuple[Item, ...]:
    forward = (Item(Point.USE, "layer0"), Item(Part.FORWARD, "", 20_000), Item(Point.USE, "layer1"))
    ready = tuple(Item(Point.READY, name) for name in MODEL.ready_order)
    backward = (
        Item(Part.BACKWARD, "", 10_000),
        *ready,
        Item(Point.BACKWARD_END),
        Item(Part.FINALIZE, "", COPY_NS),
    )
    update = (Item(Point.STEP), Item(Part.OPTIMIZER, "", UPDATE_NS))
    return (*forward, *backward, *(() if read is None else (read,)), *update)


@dataclass
class Played:
    graph: GraphBuilder[Any]
    schedule: PlayedTimes

    def ends(self, name: str, step: int = 0, rank: int = 0) -> list[int]:
        found = [c for c in self.graph.collectives if c.name == name and c.step == step]
        return [int(self.schedule.end_ns[c.ends[rank]]) for c in found]

    def begins(self, name: str, step: int = 0, rank: int = 0) -> list[int]:
        found = [c for c in self.graph.collectives if c.name == name and c.step == step]
        return [int(self.schedule.end_ns[c.begins[rank]]) for c in found]

    def stretches(self, part: str, step: int = 0) -> list[tuple[int, int]]:
        def span(one: ComputeSpan) -> tuple[int, int]:
            return int(self.schedule.start_ns[one.operation]), int(self.schedule.end_ns[one.operation])

        own = [s for s in self.graph.spans if s.rank == 0 and s.step == step and s.part == part]
        return [span(one) for one in own]


def played(
    strategy: Strategy, read: Item | None, *, find_unused: bool = False, first: Item | None = None
) -> Played:
    model = MODEL.model_copy(update={"find_unused_parameters": find_unused})
    graph = GraphBuilder(CLUSTER, strategy.decide(Job.of(model)))
    timelines = [
        [Timeline(rank, number, (*([first] if first else []), *step(read))) for number in range(3)]
        for rank in range(2)
    ]
    lay_out_ranks(graph, plugin_of(strategy).reactions(graph, Job.of(model), strategy), timelines)
    return Played(graph, play(graph.close()))


def decoupled(gather: GatherMode) -> DecoupledStrategy:
    return DecoupledStrategy(bucket_cap_bytes=4100, gather=gather, channels=1)


CLIP = Item(Part.READ, Read.CLIP, READ_NS)
LOOK = Item(Part.READ, Read.LOOK, READ_NS)


@pytest.mark.parametrize("strategy", [DistributedDataParallelStrategy(), ParameterServerStrategy()])
def test_a_read_costs_ddp_and_servers_its_own_time(strategy: Strategy) -> None:
    read, plain = played(strategy, CLIP), played(strategy, None)
    ((start_ns, end_ns),) = read.stretches(Part.READ)
    assert end_ns - start_ns == READ_NS
    assert start_ns == max(read.ends("all_reduce")) + COPY_NS
    ends_ns = [one.schedule.end_ns[one.graph.boundaries[2][0]] for one in (read, plain)]
    assert ends_ns[0] - ends_ns[1] == 3 * READ_NS


def test_clipping_shards_waits_for_reduce_scatters_and_for_an_exchange_of_norms() -> None:
    one = played(decoupled("parameters"), CLIP)
    reduced_ns = max(one.ends("reduce_scatter"))
    assert reduced_ns >= 10_000 + HALF_NS
    first, second = one.stretches(Part.READ)
    assert first == (reduced_ns, reduced_ns + READ_NS // 2)  # a half of the elements on each of two ranks
    assert one.begins("all_reduce") == [first[1]]
    (exchanged_ns,) = one.ends("all_reduce")
    # Two rounds of a message of 8 bytes over a link with a latency of 1 us.
    assert exchanged_ns == pytest.approx(first[1] + 2 * (1000 + 64), abs=4)
    assert second == (exchanged_ns, exchanged_ns)
    assert min(one.begins("all_gather")) >= exchanged_ns
    updates = [w for w in one.graph.works if w.rank == 0 and w.step == 0]
    assert min(int(one.schedule.start_ns[w.operation]) for w in updates) == exchanged_ns


def test_a_look_at_shards_fetches_all_of_them_once() -> None:
    partly = Item(Part.READ, Read.LOOK, READ_NS, parameters=("layer0.bias",))
    for read in (LOOK, partly, Item(Part.READ, Read.CLIP_VALUE, READ_NS)):
        one = played(decoupled("parameters"), read)
        ((start_ns, end_ns),) = one.stretches(Part.READ)
        fetched = [c for c in one.graph.collectives if c.bucket < 0 and c.step == 0]
        assert [(c.name, c.size_bytes) for c in fetched] == [("all_gather", MODEL.size_bytes)]
        fetched_ns = one.ends("all_gather")[0]
        assert fetched_ns == pytest.approx(max(one.ends("reduce_scatter")) + 1000 + HALF_NS, abs=4)
        assert start_ns == fetched_ns
        assert end_ns - start_ns == READ_NS + COPY_NS
        assert min(one.begins("all_gather")[1:]) >= end_ns


def test_clipping_fetches_nothing_where_parameters_may_go_unused() -> None:
    one = played(decoupled("parameters"), CLIP, find_unused=True)
    without_bucket = [c.name for c in one.graph.collectives if c.bucket < 0 and c.step == 0]
    assert without_bucket == ["all_reduce", "all_reduce"]  # of what was used, and of norms


def test_a_read_of_gathered_gradients_waits_for_its_gathers_and_their_update_is_not_deferred() -> None:
    one = played(decoupled("gradients"), CLIP)
    gathered_ns = max(one.ends("all_gather"))
    ((start_ns, end_ns),) = one.stretches(Part.READ)
    assert (start_ns, end_ns - start_ns) == (gathered_ns, READ_NS + COPY_NS)
    updates = [span for span in one.stretches(Part.OPTIMIZER) if span[1] > span[0]]
    assert updates == [(end_ns, end_ns + UPDATE_NS)]
    assert [span for span in one.stretches(Part.OPTIMIZER, 1) if span[1] > span[0] and span[0] < end_ns] == []
    assert one.stretches(Part.FORWARD, 1) == [(end_ns + UPDATE_NS, end_ns + UPDATE_NS + 20_000)]


def test_a_read_of_some_gathered_gradients_leaves_the_others_on_their_way() -> None:
    one = played(decoupled("gradients"), Item(Part.READ, Read.LOOK, READ_NS, parameters=("layer1.bias",)))
    (index,) = one.graph.schedule.buckets_of["layer1.bias"]
    read = [s for s in one.graph.spans if s.rank == 0 and s.step == 0 and s.waited_for]
    waited = [one.graph.collectives[n].bucket for s in read for n in s.waited_for]
    assert waited == [index]
    now = [end - start for start, end in one.stretches(Part.OPTIMIZER) if end > start]
    later = [end - start for start, end in one.stretches(Part.OPTIMIZER, 1) if end > start]
    share = one.graph.schedule.buckets[index].size_bytes / MODEL.size_bytes
    own_ns, other_ns = round(UPDATE_NS * share), round(UPDATE_NS * (1 - share))
    assert now == [own_ns]
    assert later == [other_ns, own_ns]  # under forward, and at once behind the next read


@pytest.mark.parametrize("gather", ["gradients", "parameters"])
def test_a_look_at_values_brings_them_up_to_date_before_forward(gather: GatherMode) -> None:
    """The graph of a job that looks at one layer's values, and at all of them, at a step's begin."""
    for parameters in (("layer1.bias",), ()):
        read = Item(Part.READ, Read.VALUES, READ_NS, parameters=parameters)
        one = played(decoupled(gather), None, first=read)
        ((start_ns, end_ns),) = one.stretches(Part.READ, 1)
        assert end_ns - start_ns == READ_NS
        index = one.graph.schedule.buckets_of["layer1.bias"][0]
        gathers = {
            c.bucket: int(one.schedule.end_ns[c.ends[0]])
            for c in one.graph.collectives
            if c.step == 0 and c.name == "all_gather"
        }
        looked_at_ns = max(gathers.values()) if not parameters else gathers[index]
        update_ns = 0
        if gather == "gradients":
            share = one.graph.schedule.buckets[index].size_bytes / MODEL.size_bytes if parameters else 1
            update_ns = round(UPDATE_NS * share)
        assert start_ns == pytest.approx(looked_at_ns + update_ns, abs=UPDATE_NS // 2)
        assert start_ns >= looked_at_ns
