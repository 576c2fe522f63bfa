"""Compressed buckets in replay: what helps on slow links and hurts on fast ones, and what is charged for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.planning.jobs import layered_job

from headway.cluster import Cluster, CodecCost
from headway.collectives.algorithms import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL
from headway.compression.cast import Cast
from headway.compression.codec import Codec, slowdown_of, stretches_ns
from headway.compression.int8 import Int8
from headway.compression.registry import proposed
from headway.compression.top_k import TopK
from headway.job import Job
from headway.model import ModelSpec, ParameterSpec
from headway.permission import ASYNCHRONOUS, PRECISION, permitted
from headway.scheduling.buckets import GatherMode
from headway.simulator.simulate import Simulation, simulate
from headway.strategies.adaptive.policy import AdaptiveStrategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.registry import plugin_of

MIB = 2**20
BF16 = Cast(dtype="bfloat16")


def matrices(model: ModelSpec) -> ModelSpec:
    """The same model with its weights as matrices."""
    shaped: list[ParameterSpec] = []
    for each in model.parameters:
        square = each.numel % 512 == 0
        shaped.append(each.model_copy(update={"shape": (512, each.numel // 512)}) if square else each)
    return model.model_copy(update={"parameters": tuple(shaped)})


def job_on(gbps: float, world_size: int = 4, **of_cluster: Any) -> Job:
    """Eight layers of 2 MiB that compute for 90 ms, on links of this rate."""
    planned = layered_job([2 * MIB] * 8, world_size=world_size, forward_ms=30)
    hosts = tuple(h.model_copy(update={"up_gbps": gbps, "down_gbps": gbps}) for h in planned.cluster.hosts)
    cluster = planned.cluster.model_copy(update={"hosts": hosts, **of_cluster})
    return replace(planned.job, stages=(matrices(planned.model),), cluster=cluster)


def strategy(*wire: Codec | None, cap_mb: float = 4.0) -> DistributedDataParallelStrategy:
    return DistributedDataParallelStrategy(bucket_cap_mb=cap_mb, wire=wire)


def played(job: Job, *wire: Codec | None) -> Simulation:
    return simulate(job, strategy(*wire))


@pytest.mark.parametrize("codec", proposed(), ids=lambda codec: codec.describe())
def test_every_codec_helps_on_slow_links_and_hurts_on_fast_ones(codec: Codec) -> None:
    slow, fast = job_on(0.1), job_on(100.0, compute_slowdown=0.1)
    assert played(slow, codec).step_ms < 0.8 * played(slow).step_ms
    assert played(fast, codec).step_ms > played(fast).step_ms


def free(*codecs: Codec) -> dict[str, CodecCost]:
    """Costs of nothing."""
    return {c.cost_name: CodecCost(bucket_us=(0,) * 4, mib_us=(0,) * 4) for c in codecs}


def test_a_cast_that_costs_nothing_is_worth_links_of_twice_the_rate() -> None:
    half, whole = job_on(0.1, codecs=free(BF16)), job_on(0.2)
    # Two channels of ours against Gloo's two threads.
    assert played(half, BF16).step_ms == pytest.approx(played(whole).step_ms, rel=0.02)


def test_what_is_measured_is_charged_before_each_exchange_and_behind_the_last() -> None:
    codec = Int8()
    cost = CodecCost(bucket_us=(100, 10, 1), mib_us=(1000, 500, 200), slowdown=0.5)
    job = job_on(1.0, codecs={codec.cost_name: cost})
    assert job.cluster is not None
    assert stretches_ns(codec, job.cluster, 2 * MIB, 2) == [2_100_000, 1_010_000, 401_000]
    assert stretches_ns(codec, job.cluster, 2 * MIB, 1) == [2_100_000, 401_000]
    assert slowdown_of(codec, job.cluster) == 0.5
    assert stretches_ns(codec, Cluster(hosts=job.cluster.hosts), 0, 2) == [0, 0, 0], "the default is by bytes"
    cheap = played(job_on(1.0, codecs=free(codec)), codec)
    # The last bucket is encoded, added up and decoded when all else is over.
    assert played(job, codec).step_ms > cheap.step_ms + 2


def test_computation_is_slowed_down_while_codecs_compute() -> None:
    cost = CodecCost(bucket_us=(0, 0), mib_us=(5000, 0))
    calm = job_on(100.0, codecs={BF16.cost_name: cost})
    busy = job_on(100.0, codecs={BF16.cost_name: cost.model_copy(update={"slowdown": 1.0})})
    found = {job is busy: simulated(played(job, BF16)) for job in (calm, busy)}
    # Of sixteen MiB at 5 ms each most are encoded under backward, two buckets at a time.
    assert 20 < found[True] - found[False] < 90


def simulated(result: Simulation) -> float:
    """What a rank computes in a step, in ms."""
    return result.step_ms - result.waiting_ms


def test_decisions_hold_exchanges_and_are_what_is_laid_out() -> None:
    job = job_on(1.0)
    schedule = strategy(None, Int8(), TopK()).decide(job)
    kinds = [tuple(e.kind for e in bucket.exchanges) for bucket in schedule.buckets]
    assert kinds[:3] == [(), (ALL_TO_ALL, ALL_GATHER), (ALL_GATHER,)]
    assert schedule.collectives == sum(max(1, len(each)) for each in kinds)
    shares = [bucket.wire_bytes / bucket.size_bytes for bucket in schedule.buckets[:3]]
    assert shares == pytest.approx([1, 0.5, 0.08], rel=0.01)
    assert [b.all_reduced_bytes / b.size_bytes for b in schedule.buckets[:3]] == pytest.approx(
        [1, 0.25, 0.04], rel=0.01
    )
    graph = simulate(job, strategy(None, Int8(), TopK())).graph
    last = max(graph.common_steps)
    laid_out = {(c.bucket, c.name, c.size_bytes) for c in graph.collectives if c.step == last}
    decided = {
        (b.index, kind, size_bytes)
        for b in schedule.buckets
        for kind, size_bytes in (b.exchanges or ((ALL_REDUCE, b.size_bytes),))
    }
    assert laid_out == decided


def test_they_are_proposed_only_to_who_permits_precision() -> None:
    job = job_on(0.1)
    proposed = plugin_of(strategy()).propose(job).strategies
    for allowed, expected in (((), False), ((ASYNCHRONOUS,), False), ((PRECISION,), True)):
        left = [each for each in proposed if permitted(each.permissions, allowed)]
        assert any(isinstance(e, DistributedDataParallelStrategy) and e.wire for e in left) == expected
        assert all(bool(each.changes_training) == bool(each.permission) for each in left)
    on_device = job_on(0.1, library="nccl")
    wires = {
        each.wire[0]
        for each in plugin_of(strategy()).propose(on_device).strategies
        if isinstance(each, DistributedDataParallelStrategy) and each.wire
    }
    assert {type(each) for each in wires} == {Cast}
    assert simulate(on_device, strategy(BF16)).step_ms < simulate(on_device, strategy()).step_ms


def test_what_is_lost_is_said_in_words() -> None:
    assert strategy().changes_training == ""
    assert "rounded to bfloat16" in strategy(BF16).changes_training
    said = strategy(None, Int8(), BF16).changes_training
    assert said.startswith("in some buckets, gradients are rounded to 8 bits")
    assert "; or rounded to bfloat16" in said
    assert said.endswith("added in the next step, of some")
    assert "sent as int8" in strategy(Int8()).describe()
    plugin = plugin_of(strategy())
    assert plugin.explain(strategy(), strategy(Int8())) == ("gradients sent as int8",)
    assert plugin.explain(strategy(Int8()), strategy()) == ("gradients sent as they are",)
    assert plugin.explain(strategy(), strategy()) == ()


def test_what_is_kept_needs_memory() -> None:
    job = job_on(1.0)
    plugin = plugin_of(strategy())
    plain, kept = (
        plugin.footprint(job, each.decide(job), 0).buffers_bytes
        for each in (strategy(BF16), strategy(Int8()))
    )
    assert kept - plain == job.model.size_bytes


def test_decoupled_halves_are_cast_where_they_carry_gradients() -> None:
    job = job_on(0.1)
    plain = DecoupledStrategy(bucket_cap_bytes=4 * MIB)
    cast_in: dict[GatherMode, set[str]] = {
        "parameters": {"reduce_scatter"},
        "gradients": {"reduce_scatter", "all_gather"},
    }
    for gather, kinds in cast_in.items():
        cast = DecoupledStrategy(bucket_cap_bytes=4 * MIB, gather=gather, wire=BF16)
        assert cast.permission == PRECISION
        assert "rounded to bfloat16" in cast.changes_training
        assert cast.spelled_out(job).wire == BF16
        assert cast.spelled_out(job).decide(job) == cast.decide(job)
        graph = simulate(job, cast).graph
        for each in graph.collectives:
            whole = graph.schedule.buckets[each.bucket].size_bytes
            assert each.size_bytes == (whole // 2 if each.name in kinds else whole)
        slow_ms = simulate(job, plain.model_copy(update={"gather": gather})).step_ms
        assert simulate(job, cast).step_ms < 0.85 * slow_ms
        fast = job_on(100.0, compute_slowdown=0.1)
        assert (
            simulate(fast, cast).step_ms > simulate(fast, plain.model_copy(update={"gather": gather})).step_ms
        )
    with pytest.raises(ValueError, match="without error feedback"):
        DecoupledStrategy(wire=Cast(dtype="bfloat16", error_feedback=True))
    with pytest.raises(ValueError, match="must send gradients as they are"):
        AdaptiveStrategy(begin_as=DecoupledStrategy(wire=BF16))
    proposed = plugin_of(plain).propose(job).strategies
    assert {each.permission for each in proposed} == {"", PRECISION}
