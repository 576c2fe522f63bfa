from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.prediction.test_workload import tied_workload

from headway.cluster import Cluster, Host
from headway.errors import PluginError, UserError
from headway.graph.step_layout import LayerTimes
from headway.job import Job
from headway.model import ModelSpec, ParameterSpec
from headway.passes.base import Pass
from headway.plan import Plan
from headway.plugins import WARNED_VARIABLE
from headway.prediction.replayed import Prediction, predict
from headway.prediction.scaling import Crossover, crossovers, scaling
from headway.prediction.strategies import strategies_named, usual
from headway.prediction.workload import Workload
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.registry import plugins

MS = 1_000_000
DDP = DistributedDataParallelStrategy()


def one_layer(numel: int = 12_000_000) -> Workload:
    parameter = ParameterSpec(name="a.w", shape=(numel,), dtype="float32", module="a")
    spec = ModelSpec(parameters=(parameter,))
    return Workload(
        "one", "8 samples", 8, "invented", spec, (LayerTimes("a", ("a.w",), 100 * MS, 200 * MS),), 10 * MS
    )


def cluster(workers: int, gbps: float = 10.0) -> Cluster:
    hosts = tuple(Host(name=f"h{i}", workers=1, up_gbps=gbps, down_gbps=gbps) for i in range(workers))
    return Cluster(hosts=hosts, latency_us=0)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_one_bucket_takes_what_a_ring_takes_behind_backward(workers: int) -> None:
    found = predict(one_layer(), cluster(workers), "ddp", DDP)
    ring_ms = 2 * 48e6 * 8 * (workers - 1) / workers / 10e9 * 1e3
    assert found.step_ms == pytest.approx(310 + ring_ms, rel=1e-3)
    assert found.exposed_ms == pytest.approx(ring_ms, rel=1e-2)
    assert found.samples_per_s == pytest.approx(8 * workers / found.step_ms * 1e3)
    assert found.efficiency == pytest.approx(310 / found.step_ms)
    assert sum(found.breakdown_ms.values()) == pytest.approx(found.step_ms)


def test_one_worker_waits_for_nobody() -> None:
    found = predict(one_layer(), cluster(1), "ddp", DDP)
    assert found.step_ms == pytest.approx(310)
    assert found.efficiency == pytest.approx(1)


def test_decoupled_hides_half_of_a_ring_under_the_next_forward() -> None:
    ring_ms = 2 * 48e6 * 8 * 3 / 4 / 10e9 * 1e3
    strategy = DecoupledStrategy(gather="gradients", channels=1)
    found = predict(one_layer(), cluster(4), "decoupled", strategy)
    assert found.step_ms == pytest.approx(310 + ring_ms, rel=1e-3), (
        "the only layer is the first that forward needs"
    )
    two = replace(
        one_layer(),
        spec=ModelSpec(
            parameters=tuple(
                ParameterSpec(name=f"{m}.w", shape=(6_000_000,), dtype="float32", module=m) for m in "ab"
            ),
            forward_order=("a", "b"),
            ready_order=("b.w", "a.w"),
        ),
        layers=(LayerTimes("a", ("a.w",), 50 * MS, 100 * MS), LayerTimes("b", ("b.w",), 50 * MS, 100 * MS)),
    )
    halves = strategy.model_copy(update={"bucket_cap_bytes": 24_000_000})
    assert predict(two, cluster(4), "decoupled", halves).step_ms < 310 + ring_ms


def test_scaling_predicts_every_strategy_at_every_size() -> None:
    seen: list[tuple[int, int]] = []
    found = scaling(
        one_layer(), cluster(2), {"ddp": DDP}, [1, 2, 6], lambda done, total: seen.append((done, total))
    )
    assert [each.workers for each in found] == [1, 2, 6]
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert [each.step_ms for each in found] == sorted(each.step_ms for each in found)


def test_a_thousand_workers_cost_as_little_as_a_few_to_predict() -> None:
    found = predict(one_layer(), cluster(2).resized(1024), "ddp", DDP)
    ring_ms = 2 * 48e6 * 8 * 1023 / 1024 / 10e9 * 1e3
    assert found.step_ms == pytest.approx(310 + ring_ms, rel=1e-2)
    assert found.operations < 50_000


def prediction(workers: int, strategy: str, step_ms: float) -> Prediction:
    return Prediction(workers, strategy, step_ms, 0.0, 0.0, 1.0, 1.0, 0.0, {}, 0, 0)


def test_crossovers_are_where_the_order_of_two_changes() -> None:
    rows = {2: (10, 12), 4: (11, 12), 8: (15, 13), 16: (15, 15), 32: (16, 20)}
    found = [prediction(w, name, ms) for w, both in rows.items() for name, ms in zip("ab", both, strict=True)]
    assert crossovers(found) == [Crossover("a", "b", 4, 8)]


def test_strategies_are_found_by_name_with_options() -> None:
    found = strategies_named(
        ["ddp:bucket_cap_mb=10", "decoupled:gather=gradients,channels=1"], tied_workload()
    )
    assert list(found.values()) == [
        DistributedDataParallelStrategy(bucket_cap_mb=10), DecoupledStrategy(gather="gradients", channels=1),
    ]  # fmt: skip
    assert (
        tuple(strategies_named([], tied_workload()))
        == usual()
        == ("ddp", "decoupled:gather=parameters", "decoupled:gather=gradients")
    )


@pytest.mark.parametrize(
    "text",
    [
        "fsdp",
        "ddp:",
        "ddp:bucket_cap_mb",
        "ddp:bucket_cap_mb=-1",
        "ddp:cap=1",
        "ddp:bucket_cap_mb={",
        "plan.yaml",
    ],
)
def test_strategies_that_are_not_there_are_refused(text: str) -> None:
    if text == "ddp:":
        assert strategies_named([text], tied_workload())[text] == DDP
        return
    with pytest.raises(UserError) as caught:
        strategies_named([text], tied_workload())
    assert "\n" not in str(caught.value)


class Doubled(Pass):
    name: ClassVar[str] = "doubled"

    def rewrite(self, job: Job) -> Job:
        raise NotImplementedError

    def apply(self, module: Any, optimizer: Any) -> Any:
        raise NotImplementedError

    def describe(self) -> str:
        return "doubled"


def test_a_plans_passes_are_not_left_out_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.plan.plan.passes", lambda: {"doubled": Doubled})
    workload, path = tied_workload(), tmp_path / "plan.yaml"
    plan = Plan.data_parallel(DDP, 2, workload.spec)
    plan.save(path)
    assert strategies_named([str(path)], workload)[str(path)] == DDP
    plan.model_copy(update={"passes": (Doubled(),)}).save(path)
    with pytest.raises(UserError, match="predicting a plan with passes requires a trace; got doubled"):
        strategies_named([str(path)], workload)


class Foreign(DistributedDataParallelStrategy):
    name: ClassVar[str] = "foreign"

    def decide(self, job: Job) -> Any:
        raise KeyError("planted")


def test_a_strategy_of_another_package_that_fails_is_left_out_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(WARNED_VARIABLE, "")
    monkeypatch.setitem(plugins(), "foreign", plugins()["ddp"])
    strategies = {"foreign": Foreign(), "ddp": DDP}
    with pytest.raises(PluginError, match=r"the strategy foreign of .* it raised KeyError: 'planted'"):
        scaling(one_layer(), cluster(2), strategies, (2,))
    assert capsys.readouterr().err == ""
    found = scaling(one_layer(), cluster(2), strategies, (2, 4), all_needed=False)
    assert [each.strategy for each in found] == ["ddp", "ddp"]
    assert capsys.readouterr().err.count("the strategy foreign of") == 1
