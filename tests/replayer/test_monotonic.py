"""Faster links and faster computation never make a step longer, whatever is trained and under whatever plan."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.planning.bound.drawn import drawn
from tests.replayer.test_replayer import as_bucketed, cluster_of
from tests.replayer.test_replayer import job as recorded
from tests.strategies.pipeline.test_mesh import MESHES
from tests.strategies.pipeline.test_mesh import a_job as a_mesh_of
from tests.strategies.pipeline.test_policy import a_job as a_pipeline_of
from tests.synthetic import synthetic_trace

from headway.cluster import AlgorithmCost, PassSlowdown
from headway.job import Job
from headway.replayer.replayer import Replayer
from headway.simulator.simulate import simulate
from headway.simulator.what_if import WhatIf
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.pipeline.policy import PipelineStrategy

ROUNDING, ROUNDING_MS = 1e-6, 1e-3
MANY = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, print_blob=True)
FACTORS = st.sampled_from([1e-3, 0.1, 0.25, 0.5, 0.8, 1.0, 1.3, 2.0, 4.0, 16.0, 1e3])
CORES = st.sampled_from([0.0, 0.2, 1.0, 5.0])
MESH = MeshStrategy(
    pipeline=PipelineStrategy(micro_batches=2), data=DistributedDataParallelStrategy(bucket_cap_mb=25)
)


class Two(NamedTuple):
    """Two what-ifs, of which ``better`` has the faster links or the faster computation, or both."""

    worse: WhatIf
    better: WhatIf


@st.composite
def twos(draw: st.DrawFn) -> Two:
    """Two what-ifs that differ in one of their factors, or in all of them."""

    def pair() -> list[float]:
        return sorted((draw(FACTORS), draw(FACTORS)))

    fixed = draw(FACTORS)
    bandwidth, latency, compute = pair(), pair(), pair()
    differs = draw(st.sampled_from(["bandwidth", "latency", "compute", "all"]))
    for name, both in (("bandwidth", bandwidth), ("latency", latency), ("compute", compute)):
        if differs not in (name, "all"):
            both[:] = [fixed, fixed] if draw(st.booleans()) else [1.0, 1.0]
    return Two(
        WhatIf(bandwidth=bandwidth[0], latency=latency[1], compute=compute[1]),
        WhatIf(bandwidth=bandwidth[1], latency=latency[0], compute=compute[0]),
    )


def check(job: Job, strategy: Strategy, two: Two) -> None:
    worse_ms, better_ms = (simulate(each.rewrite(job), strategy).step_ms for each in two)
    assert better_ms <= worse_ms * (1 + ROUNDING) + ROUNDING_MS, (strategy, two)


def on_busy_cores(job: Job, slowdown: float, message_us: float = 0.0) -> Job:
    """``job`` whose communication takes some of the computation's cores, and whose messages cost time."""
    costs = {
        name: cost.model_copy(update={"message_us": cost.message_us + message_us, "by_size": ()})
        for name, cost in {**job.on.algorithms, "ring": job.on.cost_of("ring")}.items()
    }
    own = PassSlowdown(forward=slowdown, backward=slowdown / 2) if slowdown else None
    update = {"compute_slowdown": slowdown, "decoupled_slowdown": own, "algorithms": costs}
    return replace(job, cluster=job.on.model_copy(update=update))


def check_drawn(data: st.DataObject, **differ: bool) -> None:
    case = data.draw(drawn(**differ))
    job = on_busy_cores(case.job, data.draw(CORES), data.draw(st.sampled_from([0.0, 500.0, 5000.0])))
    _, strategy = data.draw(st.sampled_from(case.plans))
    check(job, strategy, data.draw(twos()))


@settings(MANY, max_examples=examples(15))
@given(st.data())
def test_better_is_never_slower(data: st.DataObject) -> None:
    check_drawn(data)


@settings(MANY, max_examples=examples(6))
@given(st.data())
def test_better_is_never_slower_where_ranks_differ(data: st.DataObject) -> None:
    check_drawn(data, ranks_differ=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("differ", ["", "ranks_differ", "steps_differ"])
@settings(MANY, max_examples=1000)
@given(data=st.data())
def test_better_is_never_slower_of_thousands(differ: str, data: st.DataObject) -> None:
    check_drawn(data, **({differ: True} if differ else {}))


@settings(MANY, max_examples=examples(10))
@given(
    st.sampled_from(["1f1b", "gpipe", "eager-1f1b", "zero-bubble"]),
    st.sampled_from([2, 4]), st.sampled_from([0, 10_000, 1_000_000]), CORES, twos(),
)  # fmt: skip
def test_better_is_never_slower_in_pipelines(
    order: str, stages: int, boundary_bytes: int, slowdown: float, two: Two
) -> None:
    job = replace(a_pipeline_of(stages, 4), boundary_bytes=(boundary_bytes,) * (stages - 1))
    check(on_busy_cores(job, slowdown), PipelineStrategy(micro_batches=4, order=order), two)  # type: ignore[arg-type]


@settings(MANY, max_examples=examples(6))
@given(st.sampled_from(MESHES), st.sampled_from([0.001, 1.0]), CORES, twos())
def test_better_is_never_slower_in_pipelines_side_by_side(
    mesh: dict[str, int], gbps: float, slowdown: float, two: Two
) -> None:
    check(on_busy_cores(a_mesh_of(mesh, gbps=gbps), slowdown), MESH, two)


@pytest.mark.parametrize("strategy", [None, DecoupledStrategy(bucket_cap_bytes=2**20)])
def test_links_that_are_already_fast_do_not_slow_computation_down(strategy: Strategy | None) -> None:
    """Messages' own costs keep collectives in flight for as long as before, whatever the links."""
    one = recorded(gbps=10.0)
    costs = {name: AlgorithmCost(message_us=6000) for name in ("gloo_all_reduce", "ring")}
    busy = {
        "compute_slowdown": 0.18,
        "decoupled_slowdown": PassSlowdown(forward=0.3, backward=0.2),
        "algorithms": costs,
    }
    replayer = Replayer(as_bucketed(synthetic_trace(one)), cluster_of(one).model_copy(update=busy))
    steps_ms = [replayer.replay(strategy, WhatIf(bandwidth=factor)).step_ms for factor in (0.5, 1, 2, 100)]
    assert steps_ms == sorted(steps_ms, reverse=True)
    assert steps_ms[-1] > 0.9 * steps_ms[1], "links were hardly used"
