"""Steps as blocks that a strategy may lay out in another order, split, again, or not at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.planning.jobs import layered_job

from headway.cluster import Cluster, Host
from headway.graph.build import GraphBuilder, RankCursor
from headway.graph.computation import ComputeBlock, Item, Part, Point, Timeline, blocks_of, timeline_of
from headway.graph.step_layout import lay_out_ranks
from headway.job import Job
from headway.simulation.engine import play
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.ddp_steps import Reactions

JOB = layered_job([1_000_000] * 6)
STEP = JOB.profile.timeline()
CLUSTER = Cluster(hosts=tuple(Host(name=f"h{i}", workers=1, up_gbps=1, down_gbps=1) for i in range(2)))


def test_blocks_are_the_steps_items_in_order() -> None:
    blocks = blocks_of(STEP)
    assert timeline_of(blocks, STEP) == STEP
    assert [block.kind for block in blocks if block.duration_ns] == [
        Part.FORWARD, Part.BACKWARD, Part.REST, Part.OPTIMIZER, Part.REST,
    ]  # fmt: skip
    backward = next(block for block in blocks if block.kind == Part.BACKWARD)
    assert [item.name for item in backward.items if item.kind == Point.READY] == list(JOB.profile.ready_ns)
    assert sum(block.duration_ns for block in blocks) == sum(item.duration_ns for item in STEP.items)


def test_blocks_of_a_pipeline_are_told_apart() -> None:
    order = [(Part.FORWARD, 0), (Part.FORWARD, 1), (Part.BACKWARD, 0), (Part.FORWARD, 2), (Part.BACKWARD, 1)]
    items = [Item(kind, "", 10 + m, stage=3, micro_batch=m) for kind, m in order]
    blocks = blocks_of(Timeline(0, 0, tuple(items)))
    assert [(block.kind, block.stage, block.micro_batch) for block in blocks] == [(k, 3, m) for k, m in order]


class MicroBatches(Reactions):
    """Every step in so many micro-batches, gradients ready in the last one: a layout that splits and repeats blocks."""

    count = 4

    def lay_out_step(self, cursor: RankCursor, timeline: Timeline) -> None:
        own: list[ComputeBlock] = []
        blocks = blocks_of(timeline)
        passes = [block for block in blocks if block.kind in (Part.FORWARD, Part.BACKWARD)]
        for micro_batch in range(self.count):
            last = micro_batch == self.count - 1
            for block in passes:
                part = block.scaled(1 / self.count).of_micro_batch(micro_batch)
                kept = tuple(
                    item for item in part.items if last or item.kind not in (Point.READY, Point.BACKWARD_END)
                )
                own.append(replace(part, items=kept))
        rest = [block for block in blocks if block not in passes]
        super().lay_out_step(cursor, timeline_of((*own, *rest), timeline))


class Dropped(Reactions):
    """No optimizer."""

    def lay_out_step(self, cursor: RankCursor, timeline: Timeline) -> None:
        kept = tuple(block for block in blocks_of(timeline) if block.kind != Part.OPTIMIZER)
        super().lay_out_step(cursor, timeline_of(kept, timeline))


def played(layout: type[Reactions]) -> tuple[GraphBuilder[Any], int]:
    job = Job.of(JOB.model, 2)
    graph = GraphBuilder(CLUSTER, DistributedDataParallelStrategy(bucket_cap_mb=0).decide(job))
    lay_out_ranks(graph, layout(graph, job), [[STEP, STEP], [STEP, STEP]])
    times = play(graph.close())
    return graph, int(times.end_ns.max())


def test_a_strategy_may_split_repeat_and_drop_blocks() -> None:
    stock, stock_ns = played(Reactions)
    split, split_ns = played(MicroBatches)
    computed = [sum(each.part == Part.FORWARD for each in graph.spans) for graph in (stock, split)]
    assert computed[1] == 4 * computed[0]
    assert len(split.collectives) == len(stock.collectives), "one reduction, behind the last micro-batch"
    # The last micro-batch's backward is a quarter as long, so less of it hides communication.
    assert split_ns > stock_ns
    _, dropped_ns = played(Dropped)
    assert dropped_ns == stock_ns - 2 * JOB.profile.optimizer_ns
