from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.models import layered_model

from headway.collectives.algorithms import FOR_HALVES
from headway.collectives.selection import SizeClass
from headway.errors import PlanError
from headway.job import Job
from headway.plan import Plan, Prediction
from headway.scheduling.mesh import groups_along
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.pipeline.policy import PipelineStrategy


def plan(strategy: Strategy | None = None, **changes: object) -> Plan:
    model = layered_model()
    decided = strategy or DecoupledStrategy(bucket_cap_bytes=5000).spelled_out(Job.of(model))
    prediction = Prediction(step_ms=1.5, baseline_ms=2.5, uncertainty_ms=0.1)
    made = Plan.data_parallel(decided, 2, model, prediction=prediction)
    return Plan.model_validate(dict(made) | changes)


NAMES = st.sampled_from(FOR_HALVES)
strategies = st.one_of(
    st.none(),
    st.floats(0.01, 1000).map(lambda cap: DistributedDataParallelStrategy(bucket_cap_mb=cap)),
    st.just(DistributedDataParallelStrategy()),
    st.integers(1, 10**6).map(
        lambda cap: DecoupledStrategy(bucket_cap_bytes=cap).spelled_out(Job.of(layered_model()))
    ),
    st.builds(SizeClass, size_bytes=st.integers(1, 10**6), reduce_scatter=NAMES, all_gather=NAMES).map(
        lambda small: DecoupledStrategy(by_size=(small,)).spelled_out(Job.of(layered_model()))
    ),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(30))
@given(strategy=strategies, world_size=st.integers(1, 1000), step_ms=st.floats(0, 1e6))
def test_a_plan_written_and_read_is_the_same(
    tmp_path: Path, strategy: Strategy | None, world_size: int, step_ms: float
) -> None:
    prediction = Prediction(step_ms=step_ms, baseline_ms=step_ms, uncertainty_ms=0)
    written = plan(strategy, mesh={"data": world_size}, prediction=prediction)
    written.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == written


def test_a_plan_for_another_model_or_world_size_is_refused() -> None:
    plan().check(layered_model(), 2)
    with pytest.raises(PlanError, match="another world size; got 4 workers; expected 2"):
        plan().check(layered_model(), 4)
    with pytest.raises(PlanError, match="another model"):
        plan().check(layered_model(layers=5), 2)
    with pytest.raises(PlanError, match="another model"):
        plan().check(layered_model(dtype="float64"), 2)


SMALL = "{size_bytes: 9, reduce_scatter: direct, all_gather: ring}"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("format: 2", "format: 7", "format"),
        ("decoupled:", "telepathy:", "unknown strategy"),
        ("mesh: {data: 2}", "mesh: {data: 0}", "mesh.data"),
        (
            "mesh: {data: 2}",
            "mesh: {pipeline: 2}",
            "parallel needs a strategy for each of pipeline, got one for data",
        ),
        ("  data:\n", "  Data:\n", "Data"),
        ("passes: []", "passes: [{levitation: {}}]", "unknown pass 'levitation'"),
        (
            "bucket_cap_bytes: 5000",
            "bucket_cap_bytes: -1",
            "parallel.data.decoupled.bucket_cap_bytes: .*; got -1",
        ),
        ("gather_order: [", "gather_order: [7, ", "gather_order must name every bucket once"),
        ("by_size: []", f"by_size: [{SMALL}, {SMALL}]", "by_size is not in ascending order of size_bytes"),
        (
            "by_size: []",
            "by_size: [{size_bytes: 9, reduce_scatter: telepathy, all_gather: ring}]",
            "expected ring or",
        ),
    ],
)
def test_a_damaged_plan_is_refused_on_one_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "plan.yaml"
    plan().save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(PlanError, match=said) as caught:
        Plan.load(path)
    assert "\n" not in str(caught.value)


def test_passes_of_a_pipeline_are_refused_and_not_overlooked(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    stages = [layered_model(layers=2), layered_model(layers=3)]
    Plan.pipeline(PipelineStrategy(micro_batches=4), stages).save(path)
    text = path.read_text()
    assert Plan.load(path).strategy == PipelineStrategy(micro_batches=4)
    path.write_text(text.replace("passes: []", "passes: [{accumulate: {micro_batches: 2}}]"))
    with pytest.raises(PlanError, match="a pipeline takes no passes, got accumulate"):
        Plan.load(path)


def test_a_missing_plan_says_so(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="plan not found"):
        Plan.load(tmp_path / "none.yaml")


FORMAT_1 = """
format: 1
headway: 0.1.0
strategy:
  decoupled: {bucket_cap_bytes: 5000, gather: gradients}
world_size: 2
model: {parameters: 8, size_bytes: 1, fingerprint: abc}
"""


def test_plans_of_format_1_are_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(FORMAT_1)
    read = Plan.load(path)
    assert (read.format, read.mesh, read.world_size) == (2, {"data": 2}, 2)
    assert read.strategy == DecoupledStrategy(bucket_cap_bytes=5000, gather="gradients")
    read.save(path)
    assert Plan.load(path) == read


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("world_size: 2", "world_size: 0", "world_size"),
        ("world_size: 2", "worldsize: 2", "world_size is missing"),
        ("decoupled:", "telepathy:", "unknown strategy"),
        ("model:", "gadget:", "gadget|model is missing"),
    ],
)
def test_damaged_plans_of_format_1_are_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(FORMAT_1.replace(old, new))
    with pytest.raises(PlanError, match=said):
        Plan.load(path)


def test_groups_are_those_of_a_device_mesh() -> None:
    mesh = {"pipeline": 2, "other": 3, "data": 2}
    torch_mesh = np.arange(12).reshape(2, 3, 2)
    assert groups_along(mesh, "data") == tuple(tuple(row) for row in torch_mesh.reshape(-1, 2).tolist())
    assert groups_along(mesh, "pipeline")[:2] == ((0, 6), (1, 7))
    assert groups_along(mesh, "other")[0] == (0, 2, 4)
    for dimension, size in mesh.items():
        groups = groups_along(mesh, dimension)
        assert {len(group) for group in groups} == {size}
        assert sorted(rank for group in groups for rank in group) == list(range(12))
    assert plan(mesh={"data": 3}).groups("data") == ((0, 1, 2),)
