from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.interop.settings.plans import BY_NAME, asked, meshed, piped, with_passes

from headway.errors import PlanError
from headway.interop.settings import megatron
from headway.interop.settings.request import SettingsRequest
from headway.passes.accumulate import Accumulate
from headway.passes.input_workers import InputWorkers
from headway.passes.precision import Precision
from headway.passes.recompute import Recompute
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy

DECOUPLED = ["--use-distributed-optimizer", "--overlap-param-gather"]


def arguments(asked_for: SettingsRequest) -> list[str]:
    return list(megatron.settings(asked_for).arguments)


def test_the_decoupled_all_reduce_is_its_distributed_optimizer_with_both_overlaps() -> None:
    found = megatron.settings(asked("decoupled", bucket_cap_bytes=2**20))
    assert list(found.arguments) == ["--overlap-grad-reduce", "--ddp-bucket-size", str(2**18), *DECOUPLED]
    assert not any("a size for each bucket" in lack for lack in found.lacks)
    assert any("reverse registration order" in lack for lack in found.lacks)
    gathered = megatron.settings(asked("decoupled", gather="gradients"))
    assert any("gathered gradients" in lack for lack in gathered.lacks)


def test_ddp_and_servers_are_all_reduces_under_backward() -> None:
    assert arguments(asked("ddp", bucket_cap_mb=4)) == [
        "--overlap-grad-reduce",
        "--ddp-bucket-size",
        str(2**20),
    ]
    assert arguments(asked("ddp", bucket_cap_mb=0))[-1] == "1", "a bucket closes behind every parameter"
    assert arguments(asked("parameter_server", bucket_cap_mb=2))[-1] == str(2**19)
    assert any("servers" in lack for lack in megatron.settings(asked("parameter_server")).lacks)


def test_sizes_of_their_own_become_one() -> None:
    found = megatron.settings(asked("decoupled", buckets=BY_NAME))
    assert "1347" in found.arguments
    assert any("a size for each bucket" in lack for lack in found.lacks)


def test_wire_types() -> None:
    assert "--grad-reduce-in-bf16" in arguments(asked("ddp", wire=[{"dtype": "bfloat16"}]))
    halves = megatron.settings(asked("ddp", wire=[{"dtype": "float16"}]))
    assert "--grad-reduce-in-bf16" not in halves.arguments
    assert any("wire format" in lack for lack in halves.lacks)


def test_pipelines() -> None:
    alone = megatron.settings(piped())
    assert list(alone.arguments) == ["--pipeline-model-parallel-size", "2"]
    assert "Set --global-batch-size to 8 times --micro-batch-size" in alone.use
    looped = piped(8, 2, order="interleaved")
    assert arguments(looped)[-2:] == ["--num-virtual-stages-per-pipeline-rank", "4"]
    for fitting in (piped(), looped, piped(order="kfkb")):
        assert not any("its order" in lack for lack in megatron.settings(fitting).lacks)
    for other in (piped(order="gpipe"), piped(order="kfkb", group_size=2), piped(8, 2, order="looped")):
        assert any("its order" in lack for lack in megatron.settings(other).lacks)
    both = megatron.settings(meshed(DecoupledStrategy(bucket_cap_bytes=4000)))
    assert both.arguments[:3] == ("--pipeline-model-parallel-size", "2", "--overlap-grad-reduce")
    assert "24 times --micro-batch-size: 8 micro-batches, 3 replicas" in both.use
    following = megatron.settings(piped(order="kfkb", group_sizes=[2], receive_buffers=2))
    assert any("follows the network" in lack for lack in following.lacks)
    assert any("2 receive buffers" in lack for lack in following.lacks)


def test_refusals() -> None:
    with pytest.raises(PlanError, match="it counts elements"):
        megatron.settings(asked("decoupled", traced=False))
    with pytest.raises(PlanError, match="Set micro_batches"):
        megatron.settings(piped(micro_batches=None))
    for name in ("partial-all-reduce",):
        with pytest.raises(PlanError, match="Megatron has no settings for this plan"):
            megatron.settings(asked(name))


# What the arguments are called in Megatron-Core, which has the values and not the parser.
OF_DDP = {"overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer", "bucket_size"}
RENAMED = {"ddp_bucket_size": "bucket_size"}
PLANS = (
    asked("decoupled", buckets=BY_NAME),
    asked("ddp", bucket_cap_mb=4, wire=[{"dtype": "bfloat16"}]),
    piped(8, 2, order="interleaved"),
    meshed(DistributedDataParallelStrategy(bucket_cap_mb=1)),
)
OF_PASSES = (
    with_passes(Precision(dtype="bfloat16"), Recompute(modules=("a.0", "a.1")), InputWorkers(workers=3)),
    with_passes(Precision(dtype="float16"), Accumulate(micro_batches=4)),
)  # fmt: skip


def _values(given: Sequence[str]) -> dict[str, Any]:
    """Arguments as names and values."""
    parsed: dict[str, Any] = {}
    for argument in given:
        if argument.startswith("--"):
            name = argument[2:].replace("-", "_")
            parsed[name] = True
        else:
            parsed[name] = int(argument) if argument.isdecimal() else argument
    return parsed


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("number", range(len(PLANS)))
def test_megatron_core_has_these_values(number: int) -> None:
    distributed = pytest.importorskip("megatron.core.distributed", reason="megatron-core is not installed")
    values = {RENAMED.get(name, name): value for name, value in _values(arguments(PLANS[number])).items()}
    own = {name: value for name, value in values.items() if name in OF_DDP}
    read = distributed.DistributedDataParallelConfig(**own)
    assert {name: getattr(read, name) for name in own} == own
    parallel = pytest.importorskip("megatron.core.model_parallel_config")
    size, chunks = (
        values.get(name, 1)
        for name in ("pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
    )
    config = parallel.ModelParallelConfig(
        pipeline_model_parallel_size=size,
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_dtype=torch.float32,
    )
    assert config.pipeline_model_parallel_size * config.virtual_pipeline_model_parallel_size == size * chunks
    assert set(values) - OF_DDP <= {
        "pipeline_model_parallel_size",
        "num_virtual_stages_per_pipeline_rank",
        "grad_reduce_in_bf16",
    }


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("number", range(len(PLANS + OF_PASSES)))
def test_megatrons_parser_takes_them(number: int) -> None:
    training = pytest.importorskip("megatron.training.arguments", reason="Megatron-LM is not installed")
    parser = training.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    given = arguments((PLANS + OF_PASSES)[number])
    read = vars(parser.parse_args(given))
    for name, value in _values(given).items():
        assert read[name] == value
