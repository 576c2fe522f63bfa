"""Pipelines predicted without a trace: split, placed, and refused where they cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.cluster import Cluster, Host, SlowPath
from headway.errors import UserError
from headway.prediction.models import workload_named
from headway.prediction.pipelines import PlacedPipelines, PlacedStage, PredictedPipeline, play_pipeline
from headway.prediction.replayed import predict
from headway.prediction.scaling import scaling
from headway.prediction.strategies import strategies_named
from headway.prediction.workload import Workload
from headway.strategies.pipeline import cut_job


def a_workload() -> Workload:
    return workload_named("gpt2", None, "sgd")


def a_cluster(*gbps: float) -> Cluster:
    hosts = tuple(Host(name=f"h{i}", workers=1, up_gbps=g, down_gbps=g) for i, g in enumerate(gbps))
    return Cluster(hosts=hosts, latency_us=1, library="nccl")


def test_a_pipeline_on_fast_links_takes_its_bubble() -> None:
    """Times of layers of a whole batch, M micro-batches on S stages: the slowest stage and the others once."""
    workload = a_workload()
    found = predict(workload, a_cluster(1e5, 1e5), "pipeline", PredictedPipeline(micro_batches=8))
    computed_ms = (workload.computation_ns - workload.optimizer_ns) / 1e6
    least = computed_ms * (1 + 1 / 8)  # evenly split
    assert least <= found.step_ms < least * 1.12
    assert found.samples_per_s == pytest.approx(2 * workload.samples / found.step_ms * 1e3)
    assert "2 stages" in found.notes[0]
    assert "transformer.h." in found.notes[0]
    assert "weights that stages share" in found.notes[-1]


def test_replicas_of_stages_and_stages_by_hand() -> None:
    cluster = a_cluster(*(10.0,) * 4)
    products = predict(
        a_workload(), cluster, "pipeline", PredictedPipeline(stages=2, order="kfkb", group_size=2)
    )
    assert "2 stages of 2 replicas" in products.notes[0]
    decoupled = PredictedPipeline(stages=2, order="kfkb", group_size=2, replicas="decoupled")
    apart = play_pipeline(a_workload(), cluster, decoupled).simulation
    assert {each.name for each in apart.graph.collectives} == {"reduce_scatter", "all_gather"}
    assert 0.5 * products.step_ms < apart.step_ms < 1.1 * products.step_ms
    by_hand = PredictedPipeline(stages=2, split_points=("transformer.h.2",))
    found = predict(a_workload(), cluster, "pipeline", by_hand)
    assert "begin at transformer.h.2.ln_1" in found.notes[0]
    assert found.step_ms > products.step_ms


def test_stages_are_placed_along_fast_links() -> None:
    """A slow host in the middle is passed by each message twice, at an end once."""
    found = predict(a_workload(), a_cluster(10, 0.5, 10), "pipeline", PredictedPipeline())
    placed = [note for note in found.notes if "order of hosts" in note]
    assert placed
    assert placed[0].split("hosts ")[1].split(", ")[1] != "h1"


def two_sites(workers: int = 1, slow_gbps: float = 0.5, latency_us: float | None = None) -> Cluster:
    """Hosts of two sites in turn, with slow paths between the sites."""
    names = ["a1", "b1", "a2", "b2", "a3", "b3", "a4", "b4"]
    hosts = tuple(Host(name=name, workers=workers, up_gbps=10, down_gbps=10) for name in names)
    paths = tuple(
        SlowPath(source=one, target=other, gbps=slow_gbps, latency_us=latency_us)
        for one in names
        for other in names
        if one[0] != other[0]
    )
    return Cluster(hosts=hosts, paths=paths, latency_us=50, library="nccl")


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        (PredictedPipeline(micro_batches=8), 1),
        (PredictedPipeline(stages=4, micro_batches=4), 1),
        (PredictedPipeline(stages=2, micro_batches=2), 2),
    ],
)
def test_stages_cross_slow_paths_as_seldom_as_possible(
    strategy: PredictedPipeline, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of hosts is found that has one site after the other, with replicas too."""
    cluster = two_sites(workers)
    found = predict(a_workload(), cluster, "pipeline", strategy)
    assert found.pipelines is not None
    sites = [name[0] for name in found.pipelines.hosts]
    assert sites in (["a"] * 4 + ["b"] * 4, ["b"] * 4 + ["a"] * 4)
    monkeypatch.setattr(cut_job, "order_for", lambda cluster, *_others: tuple(range(len(cluster.hosts))))
    monkeypatch.setattr(cut_job, "EXACT", 0)
    as_named = predict(a_workload(), cluster, "pipeline", strategy)
    assert found.step_ms < (0.75 if workers == 1 else 1.0) * as_named.step_ms


def test_longer_paths_count_as_slower_ones_do() -> None:
    strategy = PredictedPipeline(micro_batches=8)
    near, far = (
        predict(a_workload(), two_sites(slow_gbps=10, latency_us=us), "pipeline", strategy)
        for us in (None, 50_000)
    )
    assert far.pipelines is not None
    assert [name[0] for name in far.pipelines.hosts] == sorted(name[0] for name in far.pipelines.hosts)
    assert 100 <= far.step_ms - near.step_ms < 200  # there and back once


def test_the_answer_says_which_host_has_which_stage() -> None:
    found = predict(a_workload(), a_cluster(*(10.0,) * 4), "pipeline", PredictedPipeline(stages=2))
    document = found.to_document()["pipelines"]
    assert sorted(document["mesh"].items()) == [("data", 2), ("pipeline", 2)]
    assert [stage["stage"] for stage in document["stages"]] == [0, 1]
    assert sorted(name for stage in document["stages"] for name in stage["hosts"]) == ["h0", "h1", "h2", "h3"]
    assert "stage 0 on h" in found.notes[1]
    many = PlacedPipelines(
        {"pipeline": 2, "data": 20},
        8,
        tuple(f"h{i}" for i in range(40)),
        (
            PlacedStage(0, "a", tuple(f"h{i}" for i in range(20))),
            PlacedStage(1, "b", tuple(f"h{i}" for i in range(20, 40))),
        ),
    )
    assert (
        many.describe()
        == "stage 0 on 20 hosts from h0 to h19, and so on to stage 1 on 20 hosts from h20 to h39"
    )


@pytest.mark.parametrize(
    ("strategy", "workers", "said"),
    [
        (PredictedPipeline(stages=3), 4, "whole pipelines"),
        (PredictedPipeline(), 32, "at most 14"),
        (PredictedPipeline(micro_batches=100), 2, "fewer samples than micro-batches"),
        (PredictedPipeline(split_points=("nowhere",)), 2, "where a split point says"),
        (PredictedPipeline(split_points=("transformer.h.0.attn",)), 2, "where a split point says"),
        (PredictedPipeline(split_points=("transformer.h.2", "transformer.h.4")), 2, "do not make the stages"),
    ],
)
def test_what_is_refused(strategy: PredictedPipeline, workers: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        predict(a_workload(), a_cluster(*(10.0,) * workers), "pipeline", strategy)


def test_a_model_of_which_nobody_knows_where_to_cut_it() -> None:
    workload = a_workload()
    layers = tuple(replace(layer, cut_bytes=0) for layer in workload.layers)
    with pytest.raises(UserError, match="where the model may be cut"):
        predict(replace(workload, layers=layers), a_cluster(10, 10), "pipeline", PredictedPipeline())


def test_sizes_that_make_no_whole_pipelines_are_left_out() -> None:
    workload, cluster = a_workload(), a_cluster(*(10.0,) * 4)
    strategies = strategies_named(["ddp", "pipeline:stages=4,micro_batches=8"], workload)
    found = scaling(workload, cluster, strategies, [1, 2, 4])
    assert [(each.workers, each.strategy[:3]) for each in found] == [
        (1, "ddp"),
        (2, "ddp"),
        (4, "ddp"),
        (4, "pip"),
    ]
