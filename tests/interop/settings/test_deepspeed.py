from __future__ import annotations

import json
from typing import Any

import pytest
from tests.interop.settings.plans import BY_NAME, asked, meshed, piped, with_passes

from headway.errors import PlanError
from headway.interop.settings import deepspeed
from headway.interop.settings.request import SettingsRequest
from headway.passes.accumulate import Accumulate
from headway.passes.precision import Precision
from headway.strategies.ddp.policy import DistributedDataParallelStrategy

ELEMENTS = 1010  # of a layer


def written(asked_for: SettingsRequest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(deepspeed.settings(asked_for).files[deepspeed.FILE])
    return found


def test_a_cap_is_counted_in_elements() -> None:
    zero = written(asked("decoupled", bucket_cap_bytes=2**20))["zero_optimization"]
    assert (zero["stage"], zero["reduce_bucket_size"], zero["overlap_comm"]) == (1, 2**18, True)
    assert written(asked("ddp", bucket_cap_mb=2))["zero_optimization"]["reduce_bucket_size"] == 2**19


def test_buckets_of_several_sizes_have_their_mean_and_it_is_said() -> None:
    found = deepspeed.settings(asked("decoupled", buckets=BY_NAME))
    zero = json.loads(found.files[deepspeed.FILE])["zero_optimization"]
    assert zero["reduce_bucket_size"] == round(4 * ELEMENTS / 3)
    assert zero["allgather_bucket_size"] % 2 == 0, "ZeRO asserts it"
    assert zero["allgather_bucket_size"] - zero["reduce_bucket_size"] in (0, 1)
    assert "a size for each bucket (1,010 to 2,010 elements): all get 1,347" in found.lacks


def test_what_it_does_instead_is_said() -> None:
    assert any("step() gathers" in lack for lack in deepspeed.settings(asked("decoupled")).lacks)
    assert any(lack.startswith("all-reduces") for lack in deepspeed.settings(asked("ddp")).lacks)
    assert any(one.startswith("servers") for one in deepspeed.settings(asked("parameter_server")).lacks)
    assert any(
        "gathered gradients" in one
        for one in deepspeed.settings(asked("decoupled", gather="gradients")).lacks
    )


@pytest.mark.parametrize(
    ("wire", "expected"),
    [
        ([{"dtype": "bfloat16"}], "bf16"),
        ([{"dtype": "float16"}], "fp16"),
        ([None, {"dtype": "float16"}], None),
    ],
)
def test_wire_types(wire: list[Any], expected: str | None) -> None:
    found = deepspeed.settings(asked("ddp", bucket_cap_mb=1, wire=wire))
    assert json.loads(found.files[deepspeed.FILE]).get("communication_data_type") == expected
    assert any("wire format" in lack for lack in found.lacks) == (expected is None)


def test_a_pipelines_micro_batches_and_its_order() -> None:
    alone = deepspeed.settings(piped())
    assert json.loads(alone.files[deepspeed.FILE]) == {"gradient_accumulation_steps": 8}
    assert "num_stages=2" in alone.use
    assert not any("its order" in lack for lack in alone.lacks)
    for options in ({"order": "gpipe"}, {"order": "kfkb", "group_size": 2}):
        assert any("its order" in lack for lack in deepspeed.settings(piped(**options)).lacks)
    several = deepspeed.settings(piped(4, 2, order="interleaved", receive_buffers=3))
    assert any("4 stages on 2 ranks" in lack for lack in several.lacks)
    assert any("3 receive buffers" in lack for lack in several.lacks)
    both = written(meshed(DistributedDataParallelStrategy(bucket_cap_mb=1)))
    assert set(both) == {"gradient_accumulation_steps", "zero_optimization"}


def test_refusals() -> None:
    with pytest.raises(PlanError, match="it counts elements"):
        deepspeed.settings(asked("ddp", traced=False))
    for name in ("partial-all-reduce",):
        with pytest.raises(PlanError, match="DeepSpeed has no settings for this plan"):
            deepspeed.settings(asked(name))


PLANS = (
    asked("decoupled", buckets=BY_NAME), asked("ddp", bucket_cap_mb=1, wire=[{"dtype": "bfloat16"}]),
    asked("parameter_server"), piped(), meshed(DistributedDataParallelStrategy(bucket_cap_mb=1)),
    with_passes(Precision(dtype="bfloat16"), Accumulate(micro_batches=4)),
)  # fmt: skip


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("number", range(len(PLANS)))
def test_deepspeed_reads_it(number: int) -> None:
    config = pytest.importorskip("deepspeed.runtime.config", reason="deepspeed is not installed")
    mine = written(PLANS[number])
    read = config.DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **mine})
    zero = mine.get("zero_optimization", {})
    for name, value in zero.items():
        assert getattr(read.zero_config, name) == value
    assert set(zero) <= set(type(read.zero_config).model_fields), (
        "unknown names would be kept, and mean nothing"
    )
    assert read.gradient_accumulation_steps == mine.get("gradient_accumulation_steps", 1)
    if "torch_autocast" in mine:
        assert read.torch_autocast_enabled
        assert str(read.torch_autocast_dtype) == f"torch.{mine['torch_autocast']['dtype']}"
        assert read.torch_autocast_lower_precision_safe_modules == []
    if "communication_data_type" in mine:
        assert str(read.communication_data_type) == "torch.bfloat16"
