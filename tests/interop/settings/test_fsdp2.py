from __future__ import annotations

from typing import Any

import pytest
from tests.interop.settings.plans import BY_NAME, MODEL, asked, meshed

from headway.errors import PlanError
from headway.interop.settings import fsdp2
from headway.model import ModelSpec, ParameterSpec
from headway.strategies.decoupled.policy import DecoupledStrategy


def defined(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(text, names)
    return names


def spec(*names: str, numel: int = 100) -> ModelSpec:
    parameters = tuple(
        ParameterSpec(name=name, shape=(numel,), dtype="float32", module=name.rpartition(".")[0])
        for name in names
    )
    return ModelSpec(parameters=parameters)


def test_groups_are_the_modules_of_buckets_in_the_order_of_forward() -> None:
    buckets = [["layer3.bias", "layer3.weight"], ["layer2.bias", "layer2.weight", "layer1.bias", "layer1.weight"],
               ["layer0.bias", "layer0.weight"]]  # fmt: skip
    found = fsdp2.settings(asked("decoupled", buckets=buckets, channels=3))
    names = defined(found.files[fsdp2.FILE])
    assert names["GROUPS"] == [["layer0"], ["layer1", "layer2"], ["layer3"]]
    assert names["AHEAD"] == 3
    assert [lack.split()[0] for lack in found.lacks] == ["gathers", "its"]


def test_a_module_whose_parameters_are_apart_goes_where_most_of_it_is() -> None:
    found = fsdp2.settings(asked("decoupled", buckets=BY_NAME))
    assert defined(found.files[fsdp2.FILE])["GROUPS"] == [["layer0"], ["layer1", "layer2"], ["layer3"]]
    assert any("1 modules are in the bucket" in lack for lack in found.lacks)
    apart = [["layer3.bias"], ["layer3.weight"], *(list(one) for one in (BY_NAME[0][2:], *BY_NAME[1:]))]
    fewer = fsdp2.settings(asked("decoupled", buckets=apart))
    assert any("5 buckets: there are 3 groups" in lack for lack in fewer.lacks)


def test_what_a_module_holds_inside_of_one_that_has_parameters_is_its_own() -> None:
    model = spec(
        "stem.weight",
        "attention.in_proj",
        "attention.out.weight",
        "stack.0.weight",
        "stack.1.weight",
        "scale",
    )
    found = fsdp2.settings(asked("decoupled", model=model, bucket_cap_bytes=10**6))
    assert defined(found.files[fsdp2.FILE])["GROUPS"] == [["stem", "attention", "stack.0", "stack.1"]]
    assert any("1 parameters of the root module" in lack for lack in found.lacks)


def test_names_of_modules_are_never_code() -> None:
    evil = "a']]\nraise SystemExit #.weight"
    model = spec(evil, "b.weight")
    found = fsdp2.settings(asked("decoupled", model=model, bucket_cap_bytes=10))
    assert defined(found.files[fsdp2.FILE])["GROUPS"] == [[evil.rpartition(".")[0]], ["b"]]


def test_gathered_gradients_are_said_to_be_parameters() -> None:
    found = fsdp2.settings(asked("decoupled", gather="gradients"))
    assert any(lack.startswith("gathered gradients") for lack in found.lacks)


def test_parameters_without_a_dimension_are_refused() -> None:
    scalar = ParameterSpec(name="logits.scale", shape=(), dtype="float32", module="logits")
    model = ModelSpec(parameters=(scalar, *spec("b.weight").parameters))
    with pytest.raises(PlanError, match=r"without a dimension.*logits\.scale"):
        fsdp2.settings(asked("decoupled", model=model))


def test_refusals() -> None:
    for name in ("ddp", "parameter_server", "partial-all-reduce"):
        with pytest.raises(PlanError, match="FSDP2 has no settings for this plan"):
            fsdp2.settings(asked(name))
    with pytest.raises(PlanError, match="FSDP2 has no settings for this plan"):
        fsdp2.settings(meshed(DecoupledStrategy()))
    with pytest.raises(PlanError, match="need the model: its groups are modules"):
        fsdp2.settings(asked("decoupled", traced=False))
    with pytest.raises(PlanError, match="no settings for this model"):
        fsdp2.settings(asked("decoupled", model=spec("scale", "shift")))
    assert MODEL.parameters
