"""Other splits of a recorded pipeline's modules: found, named, and laid over the recorded steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.cluster import Cluster, Host
from headway.graph.computation import Computation, Item, Part, Point, Timeline
from headway.job import Job
from headway.model import Chain, ChainLink, ModelSpec, ParameterSpec
from headway.simulator.simulate import simulate
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.pipeline.stage_links import StageLinks, why_not_split

MS, MICRO_BATCHES = 1_000_000, 8


def a_stage(names: str) -> ModelSpec:
    """Modules that take 1 ms there and 2 back for a micro-batch, and hand on 1000 bytes."""
    return ModelSpec(
        parameters=tuple(
            ParameterSpec(name=f"{name}.weight", shape=(250,), dtype="float32", module=name) for name in names
        ),
        optimizer_state_bytes=1000 * len(names),
        chain=Chain(
            links=tuple(
                ChainLink(
                    name=name, parameters=(f"{name}.weight",), output_bytes=1000 * (name != names[-1]), kept_bytes=500,
                    forward_ns=MS, backward_ns=2 * MS,
                )
                for name in names
            ),
            samples=4,
        ),
    )  # fmt: skip


def a_job(stages: tuple[ModelSpec, ...]) -> Job:
    timelines = {}
    for stage, model in enumerate(stages):
        assert model.chain is not None
        count = len(model.chain.links)
        items = [
            Item(part, duration_ns=ms * count * MS, stage=stage, micro_batch=each)
            for part, ms in ((Part.FORWARD, 1), (Part.BACKWARD, 2))
            for each in range(MICRO_BATCHES)
        ]
        items += [Item(Point.STEP), Item(Part.OPTIMIZER, duration_ns=count * MS)]
        timelines[stage] = (Timeline(stage, 0, tuple(items)),)
    hosts = tuple(Host(name=f"h{rank}", workers=1, up_gbps=1e6, down_gbps=1e6) for rank in range(len(stages)))
    return Job(
        stages, len(stages), Cluster(hosts=hosts, latency_us=0, library="nccl"), Computation(timelines),
        boundary_bytes=(1000,) * (len(stages) - 1),
    )  # fmt: skip


UNEVEN = (a_stage("abcde"), a_stage("f"))
EVEN = (a_stage("abc"), a_stage("def"))


def free(_stage: int, _bytes: int) -> float:
    return 0.0


def test_the_best_split_is_that_of_a_job_that_was_built_so() -> None:
    links = StageLinks(UNEVEN, (1000,))
    assert links.ends == (5, 6)
    best = links.splits(MICRO_BATCHES, free)[0]
    assert best.ends == (3, 6)
    assert links.moves(best.ends) == "d … e from stage 0 to stage 1"
    assert links.points(best.ends) == ("d",)
    job = links.resplit(a_job(UNEVEN), best.ends)
    built = a_job(EVEN)
    strategy = PipelineStrategy(micro_batches=MICRO_BATCHES)
    assert simulate(job, strategy).step_ms == pytest.approx(simulate(built, strategy).step_ms, rel=1e-6)
    assert simulate(job, strategy).step_ms < 0.7 * simulate(a_job(UNEVEN), strategy).step_ms
    for one, other in zip(job.stages, built.stages, strict=True):
        assert one.parameters == other.parameters
        assert one.optimizer_state_bytes == other.optimizer_state_bytes
        assert one.activation_bytes == 1500


def test_a_dear_boundary_is_not_taken() -> None:
    stage = UNEVEN[0]
    assert stage.chain is not None
    links = tuple(
        each.model_copy(update={"output_bytes": 10**6}) if each.name == "c" else each
        for each in stage.chain.links
    )
    dear = stage.model_copy(update={"chain": stage.chain.model_copy(update={"links": links})})
    found = StageLinks((dear, UNEVEN[1]), (1000,)).splits(MICRO_BATCHES, lambda _stage, size: 100.0 * size)[0]
    assert found.ends in ((2, 6), (4, 6))


def test_points_by_hand() -> None:
    links = StageLinks(UNEVEN, (1000,))
    assert links.ends_at(("d",)) == (3, 6)
    assert links.ends_at(("f",)) == links.ends
    for points in (("a",), ("z",), ("b", "c"), ()):
        assert links.ends_at(points) is None
    separately = StageLinks((a_stage("ab"), a_stage("ab")), (1000,))
    assert not separately.named
    assert separately.ends_at(("b",)) is None


def test_why_nothing_is_known() -> None:
    assert why_not_split(UNEVEN) == ""
    assert "several stages" in why_not_split(UNEVEN, stages_a_rank=2)
    assert "replicas" in why_not_split(UNEVEN, replicas=2)
    assert "tensors between modules" in why_not_split(
        (UNEVEN[0].model_copy(update={"chain": None}), UNEVEN[1])
    )
    refused = UNEVEN[0].model_copy(update={"chain": Chain(why_not="they run compiled")})
    assert why_not_split((refused, UNEVEN[1])) == "stage 0: they run compiled"
    chain = UNEVEN[1].chain
    assert chain is not None
    untimed = chain.model_copy(
        update={"links": tuple(each.model_copy(update={"forward_ns": 0}) for each in chain.links)}
    )
    assert "stage 1 were not timed" in why_not_split(
        (UNEVEN[0], UNEVEN[1].model_copy(update={"chain": untimed}))
    )


def test_messages_of_a_recorded_order_have_the_new_sizes() -> None:
    from headway.graph.computation import MessageEnd

    job = a_job(UNEVEN)
    message = Item(
        Point.MESSAGE, size_bytes=1000, message=MessageEnd(sends=True, peer=1, group="g", sequence=0)
    )
    own = job.steps.timelines[0][0]
    timelines = {**job.steps.timelines, 0: (replace(own, items=(*own.items, message)),)}
    chain = UNEVEN[0].chain
    assert chain is not None
    wide = tuple(
        each.model_copy(update={"output_bytes": 5000}) if each.name == "c" else each for each in chain.links
    )
    stages = (UNEVEN[0].model_copy(update={"chain": chain.model_copy(update={"links": wide})}), UNEVEN[1])
    found = StageLinks(stages, (1000,)).resplit(replace(job, computation=Computation(timelines)), (3, 6))
    assert found.steps.timelines[0][0].items[-1].size_bytes == 5000
    assert found.boundary_bytes == (5000,)
