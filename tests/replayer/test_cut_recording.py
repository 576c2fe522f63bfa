"""Pipelines of a data-parallel recording of known times: their job, what is expected of it, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.replayer.test_replayer import as_bucketed, cluster_of, job
from tests.synthetic import synthetic_trace
from tests.synthetic_job import SyntheticJob

from headway.cluster import Cluster, Host
from headway.errors import PlanError
from headway.graph.computation import Computation, Item, Part, Point, Timeline
from headway.job import Job
from headway.model import Chain, ChainLink
from headway.optimization.explanation import explain
from headway.optimization.recut import recuts
from headway.optimization.result import plan_of
from headway.optimization.search import search
from headway.replayer.cut_recording import CUT_SHARE, CutRecording, why_not_cut
from headway.replayer.replayer import Replayer
from headway.simulator.simulate import simulate
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.pipeline.stage_times import Split
from headway.trace.format import Trace

MODULES = ("stem", "layer1", "layer2", "head")
HANDED_ON = 1_000_000
CHAIN = Chain(
    links=tuple(
        ChainLink(
            name=name, parameters=(f"{name}.weight",), output_bytes=HANDED_ON * (name != "head"), kept_bytes=2_000_000
        )
        for name in MODULES
    ),
    samples=8,
)  # fmt: skip
MS = 1_000_000


def of_four(**options: Any) -> SyntheticJob:
    return job(**{"world_size": 4, "forward_ms": 20, "backward_ms": 40, **options})


def recorded(chain: Chain | None = CHAIN, **options: Any) -> Trace:
    trace = as_bucketed(synthetic_trace(of_four(**options)))
    return replace(trace, model=trace.model.model_copy(update={"chain": chain}))


def replayer(trace: Trace | None = None, **options: Any) -> Replayer:
    return Replayer(trace or recorded(**options), cluster_of(of_four(**options)))


def test_a_step_of_stages_is_that_of_a_job_reckoned_by_hand() -> None:
    """Four ranks, modules that take 5 and 10 ms for a batch of 8: four stages train 32 samples in 16 parts of 2."""
    of = replayer()
    found = next(
        each for each in recuts(of, ()).found if each.name.startswith("4 stages, pipeline, 1F1B, 16")
    )
    assert isinstance(found.strategy, PipelineStrategy)
    assert found.strategy.split_points == ("layer1", "layer2", "head")
    items = {
        stage: [
            *(
                Item(part, duration_ns=round(ms / 4 * MS), stage=stage, micro_batch=each)
                for part, ms in ((Part.FORWARD, 5), (Part.BACKWARD, 10))
                for each in range(16)
            ),
            Item(Point.STEP),
            Item(Part.OPTIMIZER, duration_ns=round(2 / 4 * MS)),
            Item(Part.REST, duration_ns=3 * MS // 2),
        ]
        for stage in range(4)
    }  # fmt: skip
    by_hand = Job(
        stages=found.job.stages,
        world_size=4,
        cluster=of.cluster,
        computation=Computation({stage: (Timeline(stage, 0, tuple(own)),) for stage, own in items.items()}),
        boundary_bytes=(HANDED_ON // 4,) * 3,
    )
    played = simulate(by_hand, PipelineStrategy(micro_batches=16))
    assert found.simulation.step_ms == pytest.approx(played.step_ms, rel=0.02)
    # Nineteen turns of 3.75 ms, and what is around them, if messages took no time.
    assert found.simulation.step_ms >= 19 * 3.75 + 2
    assert found.job.boundary_bytes == (HANDED_ON // 4,) * 3
    expected = of.expect(found.simulation)
    assert expected.uncertainty_ms >= CUT_SHARE * expected.step_ms


def test_what_calls_cost_at_most_is_in_the_uncertainty() -> None:
    """All modules take alike, so that all of it may be calls, which then do not shrink with micro-batches."""
    of = replayer(gbps=1000)
    recording = CutRecording(of.trace, of.job)
    cut, mesh = Split((1, 2, 3, 4), 0, 0), {"pipeline": 4}
    plain, slower = recording.cut(cut, 16, mesh), recording.slower(cut, 16, mesh)
    strategy = PipelineStrategy(micro_batches=16)
    times = [simulate(each, strategy).step_ms for each in (plain, slower)]
    assert times[1] > 3 * times[0]
    of.may_be_slower(plain, slower)
    assert of.expect(simulate(plain, strategy)).uncertainty_ms >= 0.99 * (times[1] - times[0])


def test_candidates_stand_beside_those_that_the_script_follows() -> None:
    of = replayer()
    found = search(of)
    cut = [each for each in found.for_other_scripts if each.recut is not None]
    assert {len(each.recut.stages) for each in cut if each.recut} == {2, 4}
    assert "headway.parallelize" in cut[0].changes[1]
    assert found.best().recut is None
    assert all(each.is_runnable for each in (*found.candidates, *found.like(found.best())))
    best = found.best("pipeline")
    assert best.recut is not None
    assert found.best("stages") == best
    two = next(each for each in cut if each.recut and len(each.recut.stages) == 2)
    assert isinstance(two.strategy, MeshStrategy)
    plan = plan_of(two, of)
    assert plan.world_size == 4
    assert plan.stages
    assert sum(each.parameters for each in plan.stages) == 4
    of.check(plan)
    again = of.replay(plan.strategy, mesh=plan.mesh)
    assert of.expect(again).step_ms == pytest.approx(two.predicted_ms)
    assert of.expect(again).uncertainty_ms == pytest.approx(two.uncertainty_ms)
    for each in (best, two):
        explained = explain(of, found, each, go_further=True)
        assert explained is not None
        (choice,) = explained.choices
        assert choice.name == each.name
        assert choice.step_ms == pytest.approx(explained.to_ms)
        assert "exposed communication" in explained.after.parts_ms
        assert explained.further is None
    assert "BatchNorm" not in found.note
    normed = search(replayer(recorded(CHAIN.model_copy(update={"batch_norms": True}))))
    assert "BatchNorm computes its statistics of micro-batches" in normed.note


def test_a_slow_rank_has_less_to_do() -> None:
    of = replayer(slow={(3, "forward"): 20.0, (3, "backward"): 40.0})
    recording = CutRecording(of.trace, of.job)
    assert recording.speeds[3] < 0.7 * recording.speeds[0]
    layers = [
        replace(each, forward_ns=each.forward_ns / 4, backward_ns=each.backward_ns / 4)
        for each in recording.split_layers(2, 8)
    ]
    mesh = {"data": 2, "pipeline": 2}
    (cut,) = recording.splits(layers, 8, mesh, range(4), 1)
    assert cut.ends == (2, 4), "the first pipeline has two ranks that are alike"


def test_batches_split_evenly() -> None:
    of = replayer(recorded(CHAIN.model_copy(update={"samples": 6})))
    assert CutRecording(of.trace, of.job).micro_batches(4) == 12
    with pytest.raises(PlanError, match="24 samples and 16 micro-batches"):
        of.replay(PipelineStrategy(micro_batches=16, split_points=("layer1", "layer2", "head")))


@pytest.mark.parametrize(
    ("chain", "why"),
    [
        (None, "does not say how much modules hand on"),
        (
            Chain(why_not="a tensor bypasses a module and is used by a later one"),
            "a tensor bypasses a module",
        ),
        (CHAIN.model_copy(update={"links": CHAIN.links[::-1]}), "not in the order of the chain"),
        (
            CHAIN.model_copy(
                update={"links": tuple(each.model_copy(update={"output_bytes": 0}) for each in CHAIN.links)}
            ),
            "no module behind which it can be cut",
        ),
    ],
)
def test_why_there_are_none_is_said(chain: Chain | None, why: str) -> None:
    of = replayer(recorded(chain))
    assert why in why_not_cut(of.trace, of.job, of.recorded_strategy)
    found = search(of)
    assert not any(each.recut for each in found.candidates)
    assert (
        f"Pipelines were not considered: {why_not_cut(of.trace, of.job, of.recorded_strategy)}" in found.note
    )
    with pytest.raises(PlanError, match="the recorded model cannot be replayed in stages"):
        of.replay(PipelineStrategy(micro_batches=4, split_points=("layer1", "layer2", "head")))


def test_only_recordings_of_ddp_tell_the_times_of_modules() -> None:
    of = replayer()
    assert "record it with ddp" in why_not_cut(of.trace, of.job, DecoupledStrategy())


@pytest.mark.parametrize(
    ("points", "said"),
    [
        (("layer1", "nowhere", "head"), "where a split point says"),
        (("layer2", "layer1", "head"), "do not make the stages"),
        (("layer1", "layer2"), "do not share the recorded ranks"),
    ],
)
def test_stages_by_hand_that_cannot_be(points: tuple[str, ...], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        replayer().replay(PipelineStrategy(micro_batches=4, split_points=points))


def test_hosts_with_slow_links_stand_at_an_end() -> None:
    hosts = tuple(
        Host(name=f"host{rank}", workers=1, up_gbps=gbps, down_gbps=gbps)
        for rank, gbps in enumerate((8, 0.5, 8, 8))
    )
    of = Replayer(recorded(), Cluster(hosts=hosts, latency_us=10))
    found = next(each for each in recuts(of, ()).found if each.name.startswith("4 stages"))
    names = [host.name for host in found.job.on.hosts]
    assert "host1" in (names[0], names[-1])
    assert f"on hosts {', '.join(names)} in this order" in found.change
