"""Ordinary modules as pipelines (``headway.parallelize``), in more than twenty ways, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import workers
from tests.behaviour import pipelined_cases as cases

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
CASES = "tests.behaviour.pipelined_cases"
RANKS = 3
ROUNDED = {"mixed precision": 2e-2, "single floats": 1e-5}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return workers.run(RANKS, f"{CASES}:in_every_way", timeout_s=150)


@pytest.mark.parametrize("name", cases.WAYS)
def test_it_trains_as_one_process_does(found: list[dict[str, Any]], name: str) -> None:
    """The loss on every rank, and the whole model's state."""
    assert_trained(found, name, cases.trained(name, None))


SIDE_BY_SIDE = {
    "ddp": ({"pipeline": 3, "data": 2}, {}, cases.SIDE_BY_SIDE),
    "ddp, data first": ({"data": 2, "pipeline": 3}, {"name": "ddp", "bucket_cap_mb": 0}, cases.SIDE_BY_SIDE[::4]),
    "parameters gathered": (
        {"data": 2, "pipeline": 3}, {"name": "decoupled", "gather": "parameters"}, cases.SIDE_BY_SIDE,
    ),
    "gradients gathered": (
        {"pipeline": 3, "data": 2}, {"name": "decoupled", "gather": "gradients"}, cases.SIDE_BY_SIDE[::2],
    ),
}  # fmt: skip


@pytest.mark.parametrize("of", SIDE_BY_SIDE)
def test_pipelines_side_by_side_train_as_one_process_does_on_their_batches(of: str) -> None:
    sizes, data, names = SIDE_BY_SIDE[of]
    found = workers.run(6, f"{CASES}:side_by_side", sizes, data, names, timeout_s=200)
    for name in names:
        assert_trained(found, name, cases.trained(name, None, pipelines=2))


def assert_trained(found: list[dict[str, Any]], name: str, alone: dict[str, Any]) -> None:
    """Said and stored alike on all ranks, and as ``alone``."""
    near = ROUNDED.get(name, 1e-12)
    for rank, own in enumerate(found):
        where = f"{name}, rank {rank}"
        assert own[name]["said"] == pytest.approx(alone["said"], rel=near, abs=near), where
        assert own[name]["state"].keys() == alone["state"].keys()
        for key, value in alone["state"].items():
            assert own[name]["state"][key] == pytest.approx(value, rel=near, abs=near), f"{where}, {key}"
        assert own[name] == found[0][name], "the same on all ranks, tied weights to the last bit"


def test_dropout_draws_the_same_in_every_order() -> None:
    found = workers.run(RANKS, f"{CASES}:with_dropout", timeout_s=60)
    for own in found:
        assert own["1F1B"] == own["again"] == found[0]["1F1B"]
        torch.testing.assert_close(own["GPipe"], own["1F1B"], rtol=1e-12, atol=1e-12)
    assert found[0]["1F1B"] != cases.trained("plain", None)["state"]


def test_what_cannot_be_a_pipeline_is_refused() -> None:
    for said in workers.run(RANKS, f"{CASES}:refused", timeout_s=60):
        assert (
            "only a torch.nn.Sequential is cut into stages without an example of a batch; got Linear"
            in said["no Sequential"]
        )
        assert "a pipeline computes the loss behind its last stage; got loss_fn=None" in said["no loss"]
        assert "a pipeline takes no options of DDP; got bucket_cap_mb" in said["options of DDP"]
        assert (
            "the model has fewer children than there are stages; got 2; expected at least 3"
            in said["few layers"]
        )
        assert "ranks have constructed different models" in said["other models"]
        assert "modules that the model does not have; got head" in said["strange points"]
        assert "do not cut the model into as many stages" in said["points in another order"]
        assert "do not cut the model into as many stages" in said["one point"]
        assert "the optimizer updates no parameter of the model" in said["another optimizer"]
