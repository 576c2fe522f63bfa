from __future__ import annotations

from typing import Any

import pytest
from tests.interop.settings.plans import BY_NAME, MODEL, asked, meshed, piped
from tests.models import layered_model

from headway.errors import PlanError
from headway.interop.settings import ddp
from headway.model import ModelSpec
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.tool_settings import Settings

MIB = 2**20
WEIGHT, BIAS = 4000, 40  # bytes of a layer


def arguments(settings: Settings) -> dict[str, Any]:
    """What the file that was written has for DistributedDataParallel."""
    names: dict[str, Any] = {}
    exec(settings.files[ddp.FILE], names)
    found: dict[str, Any] = names["ARGUMENTS"]
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"bucket_cap_mb": None}),
        ({"bucket_cap_mb": 4}, {"bucket_cap_mb": 4.0}),
        ({"bucket_caps_mb": [2]}, {"bucket_cap_mb": 2.0}),
        ({"bucket_caps_mb": [2, 0.5]}, {"bucket_cap_mb_list": [2.0, 0.5]}),
    ],
)
def test_a_plan_of_ddp_is_all_of_it_and_needs_no_model(
    options: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = ddp.settings(asked("ddp", traced=False, **options))
    assert found.complete
    assert arguments(found) == expected


def test_a_decoupled_plan_becomes_the_same_buckets_and_says_that_they_are_not_decoupled() -> None:
    found = ddp.settings(asked("decoupled", buckets=BY_NAME))
    sizes = [WEIGHT + 2 * BIAS, 2 * WEIGHT + BIAS, WEIGHT + BIAS]
    assert arguments(found)["bucket_cap_mb_list"] == [size / MIB for size in sizes]
    (lack,) = found.lacks
    assert "none of it in the next forward" in lack
    assert "keeps the whole optimizer state" in lack
    gathers = ddp.settings(asked("decoupled", buckets=BY_NAME, gather="gradients"))
    assert "optimizer" not in gathers.lacks[0]


def test_buckets_that_ddp_cannot_make_become_about_as_many() -> None:
    halves = [
        ["layer3.bias", "layer3.weight[0:500]"],
        ["layer3.weight[500:1000]", *BY_NAME[0][2:]],
        *BY_NAME[1:],
    ]
    found = ddp.settings(asked("decoupled", buckets=halves))
    assert arguments(found) == {"bucket_cap_mb": pytest.approx(4 * (WEIGHT + BIAS) / 4 / MIB)}
    assert "stock DDP cannot make these buckets" in found.lacks[1]


def test_without_the_model_a_decoupled_plan_has_its_cap_or_is_refused() -> None:
    found = ddp.settings(asked("decoupled", traced=False, bucket_cap_bytes=MIB))
    assert arguments(found) == {"bucket_cap_mb": 1.0}
    assert "bucket boundaries" in found.lacks[1]
    with pytest.raises(PlanError, match=r"these settings need the model.*--trace"):
        ddp.settings(asked("decoupled", traced=False, buckets=BY_NAME))


def test_servers_become_all_reduces_of_the_same_buckets() -> None:
    found = ddp.settings(asked("parameter_server", bucket_cap_mb=3))
    assert arguments(found) == {"bucket_cap_mb": 3.0}
    assert "servers" in found.lacks[0]


@pytest.mark.parametrize(
    ("wire", "hook"),
    [
        ([{"dtype": "bfloat16"}], "bf16_compress_hook"),
        ([{"dtype": "float16"}, {"dtype": "float16"}], "fp16_compress_hook"),
        ([{"dtype": "bfloat16"}, None], None),
        ([{"dtype": "float64"}], None),
        ([None], ""),
    ],
)
def test_what_buckets_are_sent_as_is_a_hook_or_said_to_be_lacking(wire: list[Any], hook: str | None) -> None:
    found = ddp.settings(asked("ddp", wire=wire))
    assert ("register_comm_hook" in found.files[ddp.FILE]) == bool(hook)
    assert (hook or "") in found.files[ddp.FILE]
    assert [lack[:22] for lack in found.lacks] == (["the wire format of buc"] if hook is None else [])


def test_of_pipelines_side_by_side_it_is_what_replicas_do() -> None:
    found = ddp.settings(meshed(DistributedDataParallelStrategy(bucket_cap_mb=2)))
    assert arguments(found) == {"bucket_cap_mb": 2.0}
    assert "torch.distributed.pipelining" in found.lacks[0]
    decoupled = ddp.settings(meshed(DecoupledStrategy(bucket_cap_bytes=MIB)))
    assert arguments(decoupled) == {"bucket_cap_mb": 1.0}


@pytest.mark.parametrize("name", ["partial-all-reduce"])
def test_what_trains_otherwise_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match="DDP has no settings for this plan"):
        ddp.settings(asked(name))


def test_a_pipeline_alone_is_refused() -> None:
    with pytest.raises(PlanError, match="DDP has no stages"):
        ddp.settings(piped())


def test_a_search_while_training_is_not_expressed() -> None:
    assert "better options" in ddp.settings(asked("decoupled", tune=True)).lacks[-1]


def test_nothing_in_a_plan_becomes_code() -> None:
    """Names come from a script, and stand in comments of one printable line."""
    evil = "layer0.weight\n__import__('os').abort()  #"
    model = layered_model(1)
    odd = model.parameters[0].model_copy(update={"name": evil, "dtype": "float16"})
    two = ModelSpec(parameters=(odd, model.parameters[1]))
    found = ddp.settings(asked("decoupled", model=two, buckets=[[model.parameters[1].name], [evil]]))
    assert arguments(found)["bucket_cap_mb"] > 0


def test_with_unused_parameters_ddp_cuts_buckets_otherwise() -> None:
    model = MODEL.model_copy(update={"find_unused_parameters": True})
    found = ddp.settings(asked("decoupled", model=model, buckets=BY_NAME))
    assert "bucket_cap_mb_list" not in arguments(found)
    assert any("find_unused_parameters" in lack for lack in found.lacks)


def test_buckets_by_name_of_a_stage_become_a_cap_for_all_stages() -> None:
    found = ddp.settings(meshed(DecoupledStrategy(buckets=tuple(map(tuple, BY_NAME)))))
    assert any("bucket boundaries" in lack for lack in found.lacks)
