"""Pipelines predicted without a trace: split, placed, and refused where they cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest

from headway.cluster import Cluster, Host, SlowPath, Traffic
from headway.errors import UserError
from headway.graph.step_layout import LayerTimes
from headway.model import ModelSpec, ParameterSpec
from headway.prediction.clusters import cluster_named
from headway.prediction.collective import collective_time
from headway.prediction.models import workload_named
from headway.prediction.pipelines import (
    PipelinePlayed,
    PlacedPipelines,
    PlacedStage,
    PredictedPipeline,
    play_pipeline,
)
from headway.prediction.replayed import predict
from headway.prediction.scaling import scaling
from headway.prediction.strategies import strategies_named
from headway.prediction.workload import Workload
from headway.simulator.what_if import WhatIf
from headway.strategies.pipeline import cut_job

QUARTERS = ("h.2", "h.4", "h.6")


def a_workload() -> Workload:
    return workload_named("gpt2", None, "sgd")


def a_large_model(blocks: int, width: int) -> Workload:
    """Blocks of 12 x width^2 parameters, as of a transformer, in 16 bit, that take 100 ms each."""
    names = [f"h.{i}" for i in range(blocks)]
    parameters = tuple(
        ParameterSpec(name=f"{name}.w", shape=(12 * width**2,), dtype="float16", module=name)
        for name in names
    )
    cut_bytes = 3 * 2048 * width * 2
    layers = tuple(
        LayerTimes(name, (f"{name}.w",), 33_000_000, 67_000_000, cut_bytes=cut_bytes) for name in names
    )
    ready = tuple(each.name for each in reversed(parameters))
    spec = ModelSpec(parameters=parameters, forward_order=tuple(names), ready_order=ready)
    return Workload("large", "3 samples", 3, "by hand", spec, layers)


def a_small_model() -> Workload:
    return a_large_model(8, 1024)


def a_cluster(*gbps: float) -> Cluster:
    hosts = tuple(Host(name=f"h{i}", workers=1, up_gbps=g, down_gbps=g) for i, g in enumerate(gbps))
    return Cluster(hosts=hosts, latency_us=1, library="nccl")


def test_a_pipeline_on_fast_links_takes_its_bubble() -> None:
    """Times of layers of a whole batch, M micro-batches on S stages: the slowest stage and the others once."""
    workload = a_workload()
    found = predict(workload, a_cluster(1e5, 1e5), "pipeline", PredictedPipeline(micro_batches=6))
    computed_ms = (workload.computation_ns - workload.optimizer_ns) / 1e6
    least = computed_ms * (1 + 1 / 6)  # evenly split
    assert least <= found.step_ms < least * 1.12
    assert found.samples_per_s == pytest.approx(2 * workload.samples / found.step_ms * 1e3)
    assert "2 stages" in found.notes[0]
    assert "transformer.h." in found.notes[0]
    assert "all-reduce of shared weights" in found.notes[-1]


def test_replicas_of_stages_and_stages_by_hand() -> None:
    cluster = a_cluster(*(10.0,) * 4)
    products = predict(
        a_small_model(), cluster, "pipeline", PredictedPipeline(stages=2, order="kfkb", group_size=2)
    )
    assert "2 stages of 2 replicas" in products.notes[0]
    decoupled = PredictedPipeline(stages=2, order="kfkb", group_size=2, replicas="decoupled")
    apart = play_pipeline(a_small_model(), cluster, decoupled).simulation
    assert {each.name for each in apart.graph.collectives} == {"reduce_scatter", "all_gather"}
    assert 0.5 * products.step_ms < apart.step_ms < 1.1 * products.step_ms
    by_hand = PredictedPipeline(stages=2, split_points=("h.2",))
    found = predict(a_small_model(), cluster, "pipeline", by_hand)
    assert "begin at h.2" in found.notes[0]
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
    ("strategy", "workers", "share"),
    [
        (PredictedPipeline(micro_batches=8), 1, 0.75),
        pytest.param(
            PredictedPipeline(stages=4, micro_batches=2, split_points=QUARTERS),
            1,
            0.9,
            marks=pytest.mark.exhaustive,
        ),
        (PredictedPipeline(stages=2, micro_batches=2, split_points=QUARTERS[1:2]), 2, 0.6),
    ],
)
def test_stages_cross_slow_paths_as_seldom_as_possible(
    strategy: PredictedPipeline, workers: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of hosts is found that has one site after the other, with replicas too."""
    workload, cluster = a_large_model(8, 2048), two_sites(workers)
    found = predict(workload, cluster, "pipeline", strategy)
    assert found.pipelines is not None
    sites = [name[0] for name in found.pipelines.hosts]
    assert sites in (["a"] * 4 + ["b"] * 4, ["b"] * 4 + ["a"] * 4)
    monkeypatch.setattr(cut_job, "order_for", lambda cluster, *_others: tuple(range(len(cluster.hosts))))
    monkeypatch.setattr(cut_job, "EXACT", 0)
    as_named = predict(workload, cluster, "pipeline", strategy)
    assert found.step_ms < share * as_named.step_ms


def test_longer_paths_count_as_slower_ones_do() -> None:
    strategy = PredictedPipeline(micro_batches=8)
    near, far = (
        predict(a_small_model(), two_sites(slow_gbps=10, latency_us=us), "pipeline", strategy)
        for us in (None, 50_000)
    )
    assert far.pipelines is not None
    assert [name[0] for name in far.pipelines.hosts] == sorted(name[0] for name in far.pipelines.hosts)
    assert 100 <= far.step_ms - near.step_ms < 400  # there and back, and not at every stage


def test_the_answer_says_which_host_has_which_stage() -> None:
    found = predict(a_small_model(), a_cluster(*(10.0,) * 4), "pipeline", PredictedPipeline(stages=2))
    document = found.to_document()["pipelines"]
    assert sorted(document["mesh"].items()) == [("data", 2), ("pipeline", 2)]
    assert [stage["stage"] for stage in document["stages"]] == [0, 1]
    assert sorted(name for stage in document["stages"] for name in stage["hosts"]) == ["h0", "h1", "h2", "h3"]
    assert "stage 0 on h" in found.notes[1]
    many = PlacedPipelines(
        {"pipeline": 2, "data": 20},
        8,
        1,
        tuple(f"h{i}" for i in range(40)),
        (
            PlacedStage(0, "a", tuple(f"h{i}" for i in range(20))),
            PlacedStage(1, "b", tuple(f"h{i}" for i in range(20, 40))),
        ),
    )
    assert many.describe() == "stage 0 on 20 hosts from h0 to h19, up to stage 1 on 20 hosts from h20 to h39"


def on_hosts(hosts: int, workers: int, library: Literal["gloo", "nccl"] = "gloo", **fields: Any) -> Cluster:
    names = [f"h{i}" for i in range(hosts)]
    links = tuple(Host(name=name, workers=workers, up_gbps=10, down_gbps=10) for name in names)
    return Cluster(hosts=links, latency_us=20, library=library, **fields)


def played(cluster: Cluster, strategy: PredictedPipeline, *, fold: bool = True) -> PipelinePlayed:
    return play_pipeline(a_small_model(), cluster, strategy, fold=fold)


@pytest.mark.parametrize(
    ("cluster", "options", "ranks"),
    [
        (on_hosts(8, 1), {"stages": 2}, 2),
        (on_hosts(8, 2), {"stages": 2, "replicas": "decoupled"}, 2),
        (on_hosts(8, 2, "nccl"), {"stages": 4}, 4),
        (cluster_named("hdr-200g-nvlink").resized(32), {"stages": 2, "replicas": "decoupled"}, 8),
        (on_hosts(4, 2), {"stages": 2, "interleave": 2}, 2),
    ],
)
def test_folded_replicas_take_as_long_as_all_of_them(
    cluster: Cluster, options: dict[str, Any], ranks: int
) -> None:
    points = QUARTERS[1:2] if options["stages"] * options.get("interleave", 1) == 2 else QUARTERS
    strategy = PredictedPipeline(micro_batches=4, split_points=points, **options)
    few, everyone = (played(cluster, strategy, fold=fold) for fold in (True, False))
    assert few.simulation.graph.ranks == ranks
    assert everyone.simulation.graph.ranks == cluster.world_size
    assert few.simulation.step_ms == pytest.approx(everyone.simulation.step_ms, rel=1e-3)
    assert few.placed.mesh == everyone.placed.mesh
    assert few.placed.stages == everyone.placed.stages
    assert any("were simulated" in note or "was simulated" in note for note in few.notes)
    assert not any("played" in note for note in everyone.notes)


def test_replicas_that_are_not_alike_are_all_played() -> None:
    strategy = PredictedPipeline(stages=2, micro_batches=2, split_points=QUARTERS[1:2])
    hosts = on_hosts(4, 1).hosts
    slower = Cluster(hosts=(*hosts[:3], hosts[3].model_copy(update={"up_gbps": 5.0})), latency_us=20)
    busy = on_hosts(4, 1, traffic=(Traffic(source="h0", target="h1", gbps=1),))
    for cluster in (slower, busy, two_sites()):
        found = played(cluster, strategy)
        assert found.simulation.graph.ranks == cluster.world_size
        assert not any("played" in note for note in found.notes)


def test_a_model_of_39_billion_parameters_on_512_gpus() -> None:
    workload, cluster = a_large_model(48, 8192), cluster_named("hdr-200g-nvlink").resized(512)
    assert 38e9 < workload.spec.size_bytes / 2 < 39e9
    found = predict(workload, cluster, "pipeline", PredictedPipeline(stages=2, micro_batches=6))
    assert found.operations < 20_000
    assert found.samples_per_s == pytest.approx(1536 / found.step_ms * 1e3)
    assert "8 of 256 identical pipelines were simulated" in found.notes[-1]


def test_interleaved_stages_have_a_smaller_bubble() -> None:
    workload, cluster = a_large_model(16, 1024), a_cluster(*(1e5,) * 4)
    strategy = PredictedPipeline(stages=4, micro_batches=8)
    plain = predict(workload, cluster, "pipeline", strategy)
    looped = predict(workload, cluster, "pipeline", strategy.model_copy(update={"interleave": 4}))
    assert looped.pipelines is not None
    assert len(looped.pipelines.stages) == 16
    assert looped.pipelines.stages[0].hosts == looped.pipelines.stages[4].hosts
    assert "16 stages, 4 on each of 4 ranks, 8 micro-batches" in looped.notes[0]
    computed_ms = 16 * 100
    assert plain.step_ms == pytest.approx(computed_ms * (1 + 3 / 8), rel=0.01)
    assert looped.step_ms == pytest.approx(computed_ms * (1 + 3 / 8 / 4), rel=0.01)
    workload = a_workload()
    (by_name,) = strategies_named(["pipeline:stages=4,interleave=2"], workload).values()
    found = predict(workload, cluster, "pipeline", by_name)
    assert found.pipelines is not None
    assert found.pipelines.micro_batches % 4 == 0
    for options in ("order=interleaved", "interleave=2,order=gpipe"):
        with pytest.raises(UserError, match="interleave"):
            strategies_named([f"pipeline:stages=4,{options}"], workload)


@pytest.mark.parametrize("replicas", ["ddp", "decoupled"])
def test_replicas_of_interleaved_stages_reduce_all_gradients(replicas: Literal["ddp", "decoupled"]) -> None:
    """Stages of one rank have the same replicas, whose collectives are not taken for each other."""
    strategy = PredictedPipeline(stages=2, interleave=2, micro_batches=4, replicas=replicas)
    found = played(on_hosts(4, 1), strategy).simulation
    stages_bytes = [stage.size_bytes for stage in found.job.stages]
    halves = 2 if replicas == "decoupled" else 1
    steps = 1 + found.first_step
    assert sum(each.size_bytes for each in found.graph.collectives) == pytest.approx(
        halves * steps * sum(stages_bytes), rel=0.01
    )


def test_what_ifs_of_pipelines() -> None:
    workload, cluster = a_small_model(), on_hosts(4, 1)
    strategy = PredictedPipeline(stages=2, micro_batches=4, split_points=QUARTERS[1:2])

    def step_ms(*texts: str) -> float:
        return predict(workload, cluster, "pipeline", strategy, WhatIf.parse(texts)).step_ms

    plain = step_ms()
    assert step_ms("bandwidth=2x") < plain < step_ms("bandwidth=0.5x")
    assert step_ms("latency=1000x") > plain + 20
    assert step_ms("compute=0.5x") < plain
    assert step_ms("bandwidth:h2=0.1x") > 1.2 * plain
    slower = [step_ms(f"compute:{rank}=2x") for rank in range(4)]
    assert min(slower) > 1.1 * plain
    assert step_ms("traffic:h0:h1=9gbit") > plain
    assert step_ms("random-slowdown:20%=3x") > plain
    for text, said in (
        ("dies:1@2s", "dies after"),
        ("workers=8", "--workers"),
        ("kernels:a=2x", "recording"),
    ):
        with pytest.raises(UserError, match=said):
            step_ms(text)


def test_a_slow_worker_is_slow_wherever_its_host_is_placed() -> None:
    """Of interleaved sites the hosts are put in another order, and the slow rank goes with its host."""
    cluster, strategy = two_sites(), PredictedPipeline(micro_batches=4)
    what_if = WhatIf.parse(["compute:1=3x"])
    found = play_pipeline(a_small_model(), what_if.apply(cluster), strategy, what_if)
    factors = found.simulation.job.steps.rank_factors
    assert factors == {found.placed.hosts.index("b1"): 3.0}


def test_tensor_parallelism_within_hosts() -> None:
    """Groups of 8 share layers: an eighth of gradients and messages a worker, and all-reduces of activations."""
    workload, cluster = a_large_model(8, 4096), cluster_named("hdr-200g-nvlink").resized(64)
    plain = PredictedPipeline(stages=2, micro_batches=6)
    alone = play_pipeline(workload, cluster, plain)
    shared = play_pipeline(workload, cluster, plain.model_copy(update={"tensor": 8}))
    assert shared.placed.mesh["tensor"] == 8
    assert shared.placed.mesh["data"] == 4
    assert "Headway cannot run that" in " ".join(shared.notes)
    reduced = [
        max(each.size_bytes for each in found.simulation.graph.collectives) for found in (shared, alone)
    ]
    assert reduced[0] * 8 == reduced[1]
    assert shared.simulation.job.boundary_bytes == alone.simulation.job.boundary_bytes
    message_bytes = workload.layers[0].cut_bytes * 8 * 2 / 6  # of a micro-batch of the two groups' batches
    group = cluster.model_copy(update={"hosts": cluster.hosts[:1]})
    once_us = collective_time(group, "all-reduce", round(message_bytes)).time_us
    assert shared.tensor_ns / 1e3 == pytest.approx(8 * 4 * once_us * 6 / 2, rel=1e-3)
    found = predict(workload, cluster, "x", plain.model_copy(update={"tensor": 8}))
    assert found.workers == 64
    assert found.exposed_ms * 1e6 > shared.tensor_ns
    assert found.peak_bytes < predict(workload, cluster, "x", plain).peak_bytes
    with pytest.raises(UserError, match="tensor-parallel groups"):
        play_pipeline(workload, on_hosts(6, 4), PredictedPipeline(stages=2, tensor=3))


@pytest.mark.parametrize(
    ("strategy", "workers", "said"),
    [
        (PredictedPipeline(stages=3), 4, "whole pipelines"),
        (PredictedPipeline(), 32, "at most 14"),
        (PredictedPipeline(micro_batches=100), 2, "fewer samples than micro-batches"),
        (PredictedPipeline(split_points=("nowhere",)), 2, "at this split point"),
        (PredictedPipeline(split_points=("transformer.h.0.attn",)), 2, "at this split point"),
        (
            PredictedPipeline(split_points=("transformer.h.2", "transformer.h.4")),
            2,
            "do not give the requested number of stages",
        ),
    ],
)
def test_what_is_refused(strategy: PredictedPipeline, workers: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        predict(a_workload(), a_cluster(*(10.0,) * workers), "pipeline", strategy)


def test_a_model_of_which_nobody_knows_where_to_cut_it() -> None:
    workload = a_workload()
    layers = tuple(replace(layer, cut_bytes=0) for layer in workload.layers)
    with pytest.raises(UserError, match="no layer after which it may be split"):
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
