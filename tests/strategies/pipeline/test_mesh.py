"""Pipelines side by side: decided, refused, proposed, and replayed as reckoned by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.models import layered_model

from headway.cluster import Cluster, Host
from headway.errors import PlanError, UnsupportedError, UserError
from headway.graph.build import GraphBuilder, GroupGraph
from headway.graph.computation import Computation, Item, Part, Point, Timeline
from headway.job import Job, OptimizerUse
from headway.optimization.search import candidate_strategies
from headway.plan import Plan
from headway.scheduling.buckets import GatherMode
from headway.scheduling.mesh import groups_along
from headway.simulator.simulate import simulate
from headway.strategies.adaptive.policy import AdaptiveStrategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.parameter_server.policy import ParameterServerStrategy
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.registry import plugin_of

MS = 1_000_000
MODEL = layered_model(1)
DDP = DistributedDataParallelStrategy(bucket_cap_mb=25)
MESHES = ({"pipeline": 2, "data": 2}, {"data": 2, "pipeline": 2})


def a_job(mesh: dict[str, int], micro_batches: int = 2, gbps: float = 1e6) -> Job:
    """Forwards of 1 ms and backwards of 2; the last backward readies all gradients when it ends."""
    hosts = tuple(Host(name=f"h{rank}", workers=1, up_gbps=gbps, down_gbps=gbps) for rank in range(4))
    timelines = {}
    for ranks in groups_along(mesh, "pipeline"):
        for stage, rank in enumerate(ranks):
            timelines[rank] = (Timeline(rank, 0, tuple(items(stage, micro_batches))),)
    return Job(
        stages=(MODEL,) * 2,
        world_size=4,
        cluster=Cluster(hosts=hosts, latency_us=0, library="nccl"),
        computation=Computation(timelines),
        boundary_bytes=(0,),
        mesh=mesh,
    )


def items(stage: int, micro_batches: int) -> list[Item]:
    found = [
        Item(part, duration_ns=ms * MS, stage=stage, micro_batch=each)
        for part, ms in ((Part.FORWARD, 1), (Part.BACKWARD, 2))
        for each in range(micro_batches)
    ]
    last = micro_batches - 1
    ready = [Item(Point.READY, p.name, stage=stage, micro_batch=last) for p in MODEL.ready_parameters()]
    end = Item(Point.BACKWARD_END, stage=stage, micro_batch=last)
    return [*found, *ready, end, Item(Point.STEP), Item(Part.OPTIMIZER, duration_ns=MS)]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
def test_a_stage_hands_on_gradients_while_its_replicas_add_up_theirs(
    mesh: dict[str, int], order: str
) -> None:
    """Two stages, two micro-batches: 9 ms without communication, 1 for the update, and the first stage's reduction.

    An all-reduce over two ranks sends as many bytes as a stage has. DDP's backward returns when it is done; the
    gradient of the last micro-batch is gone by then, so that the last stage's is done under the first's backward.
    """
    strategy = MeshStrategy(pipeline=PipelineStrategy.model_validate({"order": order}), data=DDP)
    free = simulate(a_job(mesh), strategy).step_ms
    assert free == pytest.approx(10, rel=1e-3)
    gbps = MODEL.size_bytes * 8 / (4 * MS)  # 4 ms for a reduction
    busy = simulate(a_job(mesh, gbps=gbps), strategy)
    assert busy.step_ms == pytest.approx(10 + 4, rel=0.02)
    members = {collective.members for collective in busy.graph.collectives}
    assert members == set(groups_along(mesh, "data"))
    messages = {each.members for each in busy.graph.communications if each.name != "all_reduce"}
    assert {frozenset(each) for each in messages} == {
        frozenset(own) for own in groups_along(mesh, "pipeline")
    }


def test_one_slow_replica_holds_up_the_other_pipeline() -> None:
    job = a_job(MESHES[0])
    slow = replace(job, computation=job.steps.scaled(1.0, {3: 2.0}))  # the last stage of the second pipeline
    strategy = MeshStrategy(pipeline=PipelineStrategy(), data=DDP)
    apart = simulate(
        replace(
            slow,
            stages=(MODEL,) * 2,
            world_size=2,
            cluster=job.on.resized(2),
            mesh={},
            computation=Computation(
                {0: job.steps.timelines[1], 1: job.steps.timelines[3]}, rank_factors={1: 2.0}
            ),
        ),
        PipelineStrategy(),
    )
    assert simulate(slow, strategy).step_ms == pytest.approx(apart.step_ms, rel=1e-3)


def test_what_it_decides_and_refuses() -> None:
    job = a_job(MESHES[1])
    strategy = MeshStrategy(pipeline=PipelineStrategy(order="gpipe"), data=DDP)
    schedule = strategy.decide(job)
    assert schedule.pipelines == ((0, 1), (2, 3))
    assert schedule.replicas_of(1) == (1, 3)
    assert schedule.place_of[2] == (1, 0)
    assert len(schedule.buckets) == 2
    assert schedule.parts == "2 x 2 micro-batches through 2 stages"
    halved = MeshStrategy(pipeline=PipelineStrategy(order="zero-bubble"), data=DDP)
    alone = replace(job, mesh={})
    for refused, of, said in (
        (halved, job, "backward passes are split"),
        (strategy, alone, "a mesh with both dimensions"),
    ):
        with pytest.raises(PlanError, match=said):
            refused.decide(of)
    recorded = PipelineStrategy(order="recorded")
    for pipeline, data in (
        (recorded, DecoupledStrategy()),
        (PipelineStrategy(), AdaptiveStrategy()),
    ):
        with pytest.raises(PlanError, match="cannot replay pipelines"):
            MeshStrategy(pipeline=pipeline, data=data).decide(job)
    with pytest.raises(UserError, match="another number of workers than recorded"):
        job.moved_to(job.on.resized(8))


def test_only_orders_that_ddp_permits_are_proposed_with_the_recorded_replicas() -> None:
    job = a_job(MESHES[0])
    proposal = plugin_of(PipelineStrategy()).propose(job)
    recorded = MeshStrategy(pipeline=PipelineStrategy(order="recorded"), data=DDP)
    found = [strategy for strategy, _ in candidate_strategies(job, [proposal], recorded)]
    assert all(isinstance(each, MeshStrategy) and each.data == DDP for each in found)
    assert not any("zero bubble" in each.describe() for each in found)
    for each in found[1:]:
        assert simulate(job, each).step_ms >= proposal.bound_ms * 0.999
    assert plugin_of(found[0]).explain(recorded, found[1])


def test_it_holds_buckets_besides_what_a_pipeline_holds() -> None:
    job = a_job(MESHES[0])
    alone = replace(
        job, world_size=2, cluster=job.on.resized(2), mesh={},
        computation=Computation({stage: job.steps.timelines[2 * stage] for stage in range(2)}),
    )  # fmt: skip
    held = simulate(job, MeshStrategy(pipeline=PipelineStrategy(), data=DDP)).peak_bytes
    without = simulate(alone, PipelineStrategy()).peak_bytes
    assert held is not None
    assert without is not None
    assert held - without == MODEL.size_bytes


def test_a_plan_has_a_strategy_for_each_dimension() -> None:
    strategy = MeshStrategy(pipeline=PipelineStrategy(micro_batches=2), data=DDP)
    plan = Plan.on_mesh(strategy, MESHES[1], (MODEL, MODEL))
    again = Plan.model_validate(plan.model_dump(mode="json"))
    assert again == plan
    assert again.strategy == strategy
    assert again.world_size == 4
    decoupled = plan.model_copy(update={"parallel": {**plan.parallel, "data": DecoupledStrategy()}})
    assert decoupled.strategy == MeshStrategy(pipeline=strategy.pipeline, data=DecoupledStrategy())
    other = plan.model_copy(update={"parallel": {**plan.parallel, "data": ParameterServerStrategy()}})
    with pytest.raises(PlanError, match="combination of strategies"):
        _ = other.strategy


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize("uses", ["recorded", "unknown"])
def test_decoupled_replicas_gather_under_the_next_forward_of_their_stage(
    gather: GatherMode, uses: str
) -> None:
    """As the test of all-reduces: of each half, which takes 2 ms, what no computation hides.

    The first stage reduces at the end of its last backward, when nothing else is left, and gathers what its first
    forward waits for: 4 ms, as with an all-reduce. The last stage has both halves hidden: its first forward comes a
    micro-batch later.
    """
    gbps = MODEL.size_bytes * 8 / (4 * MS)
    strategy = MeshStrategy(
        pipeline=PipelineStrategy(), data=DecoupledStrategy(gather=gather, bucket_cap_bytes=2**30, channels=1)
    )
    job = a_job(MESHES[0], gbps=gbps)
    if uses == "recorded":
        job = replace(job, computation=Computation(with_uses(job, late=False)))
    found = simulate(job, strategy)
    # Gathered gradients are applied when a stage is called, by one stage after the other; of parameters each replica
    # updates its half before the gather, which for the last stage is hidden.
    update_ms = 2 if gather == "gradients" else 0.5
    assert found.step_ms == pytest.approx(9 + 4 + update_ms, rel=0.03)
    halves = {each.name for each in found.graph.collectives}
    assert halves == {"reduce_scatter", "all_gather"}


def test_a_gather_hides_under_what_comes_before_its_use() -> None:
    """Modules that are used at the end of the first forward, which takes a millisecond, are waited for so much less."""
    gbps = MODEL.size_bytes * 8 / (4 * MS)
    strategy = MeshStrategy(
        pipeline=PipelineStrategy(), data=DecoupledStrategy(bucket_cap_bytes=2**30, channels=1)
    )
    job = a_job(MESHES[0], gbps=gbps)
    early, late = (
        simulate(replace(job, computation=Computation(with_uses(job, late=late))), strategy).step_ms
        for late in (False, True)
    )
    assert early - late == pytest.approx(1, abs=0.05)


def with_uses(job: Job, *, late: bool) -> dict[int, tuple[Timeline, ...]]:
    """The steps of ``job`` with the points at which each first forward uses its modules: as it begins, or ends."""
    found: dict[int, tuple[Timeline, ...]] = {}
    for rank, (timeline,) in job.steps.timelines.items():
        first, *others = timeline.items
        uses = [
            Item(Point.USE, module, stage=first.stage, micro_batch=first.micro_batch)
            for module in dict.fromkeys(each.module for each in MODEL.parameters)
        ]
        begins = [first, *uses, first._replace(duration_ns=1)] if late else [*uses, first]
        found[rank] = (Timeline(rank, 0, (*begins, *others)),)
    return found


def test_an_update_in_two_calls_counts_once() -> None:
    """A second optimizer's step opens the next recorded step."""
    job = a_job(MESHES[0])
    strategy = MeshStrategy(pipeline=PipelineStrategy(), data=DDP)
    plain_ms = simulate(job, strategy).step_ms
    split = {}
    for rank, (timeline,) in job.steps.timelines.items():
        *others, step, update = timeline.items
        half = update._replace(duration_ns=update.duration_ns // 2)
        split[rank] = (Timeline(rank, 0, (step, half, *others, step, half)),)
    assert simulate(replace(job, computation=Computation(split)), strategy).step_ms == pytest.approx(plain_ms)


def test_what_an_optimizer_does_not_permit_is_not_replayed() -> None:
    strategy = MeshStrategy(pipeline=PipelineStrategy(), data=DecoupledStrategy(gather="parameters"))
    job = replace(a_job(MESHES[0]), optimizers=OptimizerUse(names=("Adafactor",)))
    as_run = plugin_of(strategy).as_run(strategy, job)
    assert isinstance(as_run, MeshStrategy)
    assert as_run.data == DecoupledStrategy(gather="gradients")
    refusing = replace(job, refusals={"decoupled": "it must not"})
    with pytest.raises(UnsupportedError, match="it must not"):
        plugin_of(strategy).as_run(strategy, refusing)
    assert strategy.family != MeshStrategy(pipeline=PipelineStrategy(), data=DDP).family


def test_members_of_a_group_know_which_of_them_share_a_host() -> None:
    job = a_job(MESHES[0])
    hosts = tuple(Host(name=f"h{n}", workers=2, up_gbps=10, down_gbps=10) for n in range(2))
    buckets = DDP.decide(Job.of(MODEL, 2))
    whole = GraphBuilder(job.on.model_copy(update={"hosts": hosts}), buckets)
    assert whole.hosts.ranks == ((0, 1), (2, 3))
    assert GroupGraph(whole, buckets, (1, 3)).hosts.ranks == ((0,), (1,))
    assert GroupGraph(whole, buckets, (2, 3)).hosts.ranks == ((0, 1),)
