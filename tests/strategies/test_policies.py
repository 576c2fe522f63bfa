from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests import workers
from tests.models import layered_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway import torch_private
from headway.cluster import Cluster, Host
from headway.compression.cast import Cast
from headway.errors import PlanError, UnsupportedError
from headway.ext.testing import Trained, check_strategy, check_training
from headway.graph.build import GraphBuilder
from headway.graph.computation import Computation, Item, Part, Point, Timeline
from headway.job import Job
from headway.strategies.base import short_name
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.live import module_spec
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.registry import carried_out_by, names, plugin_named, plugin_of

DATA_PARALLEL = [name for name in names() if plugin_named(name).policy.dimension == "data"]
TRAINS_OTHERWISE = [name for name in DATA_PARALLEL if plugin_named(name).policy().changes_training]
REDUCES_GRADIENTS = [name for name in DATA_PARALLEL if name not in TRAINS_OTHERWISE]


@pytest.mark.parametrize("name", DATA_PARALLEL)
def test_an_unmodified_script_can_follow_every_data_parallel_strategy(name: str) -> None:
    assert plugin_named(name).injection is not None


@pytest.mark.parametrize("name", DATA_PARALLEL)
def test_every_strategy_is_what_the_test_kit_asks_for(name: str) -> None:
    check_strategy(plugin_named(name).policy())


@pytest.mark.processes
def test_ranks_end_with_the_numbers_of_one_process() -> None:
    """All strategies on the same ranks."""
    asked = [(name, injected) for name in REDUCES_GRADIENTS for injected in (False, True)]
    ended = workers.run(2, "tests.strategies.trained_cases:trained", asked, timeout_s=120)
    for place, name in enumerate(name for name, injected in asked if not injected):
        both = iter(([Trained(*rank[2 * place + i]) for rank in ended]) for i in (0, 1))
        check_training(plugin_named(name).policy(), run=lambda *_, both=both: next(both))


def test_strategies_say_whether_they_change_what_is_trained() -> None:
    assert REDUCES_GRADIENTS == ["ddp", "decoupled", "adaptive", "parameter_server"]
    assert set(TRAINS_OTHERWISE) == {"partial-all-reduce", "local-sgd", "asynchronous-parameter-server"}
    assert plugin_named("pipeline").policy().changes_training == ""
    assert "model of its own" in plugin_named("partial-all-reduce").policy().changes_training


@pytest.mark.parametrize("name", TRAINS_OTHERWISE)
def test_what_trains_otherwise_is_simulated_over_a_time(name: str) -> None:
    plugin = plugin_named(name)
    strategy = plugin.policy()
    steps = Computation({0: (Timeline(0, 0, (Item(Part.FORWARD, "", 1_000_000), Item(Point.STEP))),)})
    cluster = Cluster(hosts=tuple(Host(name=f"h{i}", workers=1, up_gbps=1, down_gbps=1) for i in range(4)))
    job = Job((layered_model(5),), 4, cluster, steps)
    schedule = strategy.decide(job)
    assert schedule == strategy.decide(job)
    assert schedule.parts
    assert schedule.collectives >= 1
    assert plugin_of(strategy) is plugin
    assert all(each.changes_training for each in plugin.propose(job).strategies)
    assert plugin.footprint(job, schedule, 0).buffers_bytes >= job.model.size_bytes
    outcome = plugin.over_a_horizon(job, strategy)
    assert outcome is not None
    assert outcome.total_per_s > 0
    assert "trains otherwise" in outcome.describe()
    with pytest.raises(UnsupportedError):
        plugin.reactions(GraphBuilder(cluster, schedule), job, strategy)


def test_ddp_closes_a_bucket_once_it_is_full() -> None:
    model = layered_model(4, numel=262_144)  # 1 MiB a weight
    default = DistributedDataParallelStrategy().decide(Job.of(model))
    assert [len(b.parameters) for b in default.buckets] == [2, 6]  # 1 MiB first, then 25 MiB
    small = DistributedDataParallelStrategy(bucket_cap_mb=1).decide(Job.of(model))
    assert [b.parameters[-1] for b in small.buckets] == [f"layer{i}.weight" for i in (3, 2, 1, 0)]

    each = DistributedDataParallelStrategy(bucket_cap_mb=0).decide(Job.of(model))
    assert [len(b.parameters) for b in each.buckets] == [1] * 8


@pytest.mark.skipif(
    "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel.__init__).parameters,
    reason="torch 2.13 brought caps for each bucket",
)
def test_ddp_caps_a_bucket_at_a_time_live_as_decided(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(6)))
    spec = module_spec.model_spec(model)
    strategy = DistributedDataParallelStrategy(bucket_caps_mb=(0.001, 0.013, 0.004))
    decided = [len(bucket.parameters) for bucket in strategy.decide(Job.of(spec)).buckets]
    assert len(set(decided)) > 1
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = plugin_of(strategy).wrap(model, strategy, bucket_cap_mb=1, bucket_cap_mb_list=[3])
        for _ in range(3):
            wrapped(torch.ones(2, 40)).sum().backward()
        assert isinstance(wrapped, DistributedDataParallel)
        assert [len(bucket) for bucket in torch_private.ddp_buckets(wrapped)] == decided
    finally:
        dist.destroy_process_group()


def test_what_is_compiled_after_it_was_wrapped_is_in_the_parts_of_the_script(tmp_path: Path) -> None:
    """Code cannot be compiled in parts of less than a MiB, which a bucket may well be."""
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(6)))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        strategy = DistributedDataParallelStrategy(bucket_cap_mb=0.25)
        wrapped: Any = plugin_of(strategy).wrap(model, strategy, bucket_cap_mb=3)
        found = plugin_of(strategy).recognise(wrapped)
        assert found is not None
        assert found.options["bucket_cap_mb"] == 0.25
        assert not hasattr(wrapped, "_bucket_config") or wrapped.bucket_bytes_cap == 3 * 2**20
    finally:
        dist.destroy_process_group()


def test_two_kinds_of_caps_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="exclude"):
        DistributedDataParallelStrategy(bucket_cap_mb=1.0, bucket_caps_mb=(1.0,))


def test_a_plan_with_its_buckets_spelled_out_decides_the_same() -> None:
    model = layered_model()
    strategy = DecoupledStrategy(bucket_cap_bytes=5000)
    assert strategy.spelled_out(Job.of(model)).decide(Job.of(model)) == strategy.decide(Job.of(model))


@pytest.mark.parametrize(
    ("buckets", "said"),
    [
        ((("layer0.weight", "nobody"),), "the model lacks"),
        ((("layer0.weight",),), "leave out"),
        ((("layer0.weight", "layer0.bias"), ()), "bucket is empty"),
        ((("layer0.weight", "layer0.bias"), ("layer0.bias",)), "every element"),
    ],
)
def test_buckets_that_do_not_fit_the_model_are_refused(
    buckets: tuple[tuple[str, ...], ...], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        DecoupledStrategy(buckets=buckets).decide(Job.of(layered_model(1)))


def test_a_large_parameter_may_be_cut_over_several_buckets() -> None:
    model = layered_model(1)
    buckets = (("layer0.bias", "layer0.weight[600:1000]"), ("layer0.weight[0:600]",))
    schedule = DecoupledStrategy(buckets=buckets).decide(Job.of(model))
    assert [bucket.size_bytes for bucket in schedule.buckets] == [4 * 410, 4 * 600]
    assert schedule.buckets_of["layer0.weight"] == (0, 1)
    assert DecoupledStrategy(buckets=buckets).spelled_out(Job.of(model)).buckets == buckets


@pytest.mark.parametrize("text", ["layer0.weight[0:600]", "layer0.weight[5:5]", "layer0.weight[0:1001]"])
def test_parts_that_do_not_make_up_a_parameter_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="element"):
        DecoupledStrategy(buckets=(("layer0.bias", text),)).decide(Job.of(layered_model(1)))


def test_buckets_of_ddp_are_as_large_on_the_wire_as_what_is_sent() -> None:
    job = Job.of(layered_model(3))
    sent = (None, Cast(dtype="bfloat16"), Cast(dtype="float64"))
    stock = DistributedDataParallelStrategy(bucket_cap_mb=0).decide(job).buckets
    buckets = DistributedDataParallelStrategy(bucket_cap_mb=0, wire=sent).decide(job).buckets
    assert [bucket.size_bytes for bucket in buckets] == [bucket.size_bytes for bucket in stock]
    factors = [after.wire_bytes / before.wire_bytes for before, after in zip(stock, buckets, strict=True)]
    assert factors == [1, 0.5, 2, 2, 2, 2]


def test_an_explanation_names_the_algorithms_that_are_new() -> None:
    explain = plugin_named("decoupled").explain
    rings, native = DecoupledStrategy(), DecoupledStrategy(all_gather="native")
    assert list(explain(rings, native)) == ["native all-gather"]
    assert list(explain(native, native)) == []
    assert list(explain(DistributedDataParallelStrategy(), native)) == [
        "parameters are gathered",
        "native all-gather",
    ]


def test_a_short_name_has_the_codec_however_long() -> None:
    said = "DDP, bucket_cap_mb=1, sent as scaled halves without error feedback"
    assert short_name(said) == said
    caps = "DDP, caps for 12 buckets, and more of this that nobody would ever want to read, sent as int8"
    assert short_name(caps) == "DDP, caps for 12 buckets, sent as int8"
    assert len(short_name("decoupled" + ", a part" * 20)) <= 60


def test_what_nccl_ignores_or_refuses_is_said_and_not_predicted() -> None:
    chosen = DecoupledStrategy(reduce_scatter="hierarchical", ring_order=(0, 1), wire=Cast(dtype="bfloat16"))
    mesh = MeshStrategy(pipeline=PipelineStrategy(), data=chosen)
    assert carried_out_by(chosen, "gloo") == (chosen, ())
    happening, said = carried_out_by(chosen, "nccl")
    assert happening == DecoupledStrategy()
    assert [each.split(":")[0] for each in said] == ["reduce_scatter, ring_order", "wire"]
    assert carried_out_by(mesh, "nccl") == (mesh.model_copy(update={"data": happening}), said)
    cast = DistributedDataParallelStrategy(wire=(Cast(dtype="bfloat16"), None))
    assert carried_out_by(cast, "nccl") == (cast, ())
    kept = DistributedDataParallelStrategy(
        wire=(Cast(dtype="bfloat16"), Cast(dtype="float16", error_feedback=True))
    )
    happening, said = carried_out_by(kept, "nccl")
    assert happening == cast
    assert "codecs that do more than cast" in said[0]


@pytest.mark.parametrize("name", names())
def test_no_strategy_has_anything_ignored_by_default_but_those_that_need_gloo(name: str) -> None:
    _, said = carried_out_by(plugin_named(name).policy(), "nccl")
    needs_gloo = {"parameter_server", "asynchronous-parameter-server", "partial-all-reduce"}
    assert bool(said) == (name in needs_gloo)
