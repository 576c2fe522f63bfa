"""Ordinary modules as pipelines (``headway.parallelize``), in more than twenty ways, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import workers
from tests.behaviour import pipelined_cases as cases
from tests.behaviour import pipelined_training as training
from tests.behaviour.pipelined_models import layers, sgd
from tests.behaviour.pipelined_step import Step

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
CASES = "tests.behaviour.pipelined_cases"
REFUSALS = "tests.behaviour.pipelined_refusals"
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
    "ddp, data first": ({"data": 2, "pipeline": 3}, {"name": "ddp", "bucket_cap_mb": 0}, cases.SIDE_BY_SIDE[::8]),
    "parameters gathered": (
        {"data": 2, "pipeline": 3}, {"name": "decoupled", "gather": "parameters"}, cases.SIDE_BY_SIDE[1::2],
    ),
    "gradients gathered": (
        {"pipeline": 3, "data": 2}, {"name": "decoupled", "gather": "gradients"}, cases.SIDE_BY_SIDE[2::5],
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


def test_evaluations_are_left_to_torch_under_a_plan() -> None:
    """Their schedule has other stages' shapes and numbers of micro-batches than the plan, which steps alone follow."""
    found = workers.run(RANKS, f"{CASES}:evaluated_under_a_plan", timeout_s=60)
    alone = Step(layers(), sgd, None)
    expected = {"said": training.evaluated_around(alone), "state": alone.state()}
    assert [(own.pop("applied"), own.pop("order")) for own in found] == [(1, "kfkb")] * RANKS
    assert_trained([{"steps": own} for own in found], "steps", expected)


def test_dropout_draws_the_same_in_every_order() -> None:
    found = workers.run(RANKS, f"{CASES}:with_dropout", timeout_s=60)
    for own in found:
        assert own["1F1B"] == own["again"] == found[0]["1F1B"]
        torch.testing.assert_close(own["GPipe"], own["1F1B"], rtol=1e-12, atol=1e-12)
    assert found[0]["1F1B"] != cases.trained("plain", None)["state"]


def test_what_cannot_be_a_pipeline_is_refused() -> None:
    for said in workers.run(RANKS, f"{REFUSALS}:refused", timeout_s=60):
        assert (
            "only torch.nn.Sequential can be split into stages without an example batch; got Linear"
            in said["no Sequential"]
        )
        assert "a pipeline needs a loss function for its last stage; got loss_fn=None" in said["no loss"]
        assert "a pipeline accepts no DDP options; got bucket_cap_mb" in said["options of DDP"]
        assert (
            "the model has fewer children than there are stages; got 2; expected at least 3"
            in said["few layers"]
        )
        assert "ranks constructed different models" in said["other models"]
        assert "modules that the model does not have; got head" in said["strange points"]
        assert "do not give one stage per rank" in said["points in another order"]
        assert "do not give one stage per rank" in said["one point"]
        assert "the target of a pipeline must be a single tensor; got tuple" in said["two targets"]
        assert "2-norm of all of them; got 1 of the 2 parameters" in said["a part is clipped"]
        assert "norm_type=inf" in said["another norm"]
        assert "the optimizer updates no parameter of the model" in said["another optimizer"]


def test_meshes_and_batches_that_do_not_fit_are_refused() -> None:
    found = workers.run(4, f"{REFUSALS}:refused_on_meshes", timeout_s=60)
    assert "the plan is for another stage 1" in found[3]["a plan for another model"]
    for said in found:
        assert (
            "the mesh does not have the dimensions of a pipeline; got 'stages', 'data'" in said["other names"]
        )
        assert "dimensions without names" in said["no names"]
        assert "the mesh must contain every rank exactly once; got 2 ranks" in said["fewer ranks"]
        assert "mesh must be a DeviceMesh; got dict" in said["no mesh"]
        assert "cannot tell which ranks form a pipeline" in said["nothing said"]
        assert "got 4 ranks and 3 stages" in said["three stages"]
        assert "backward passes are split" in said["halved backwards"]
        assert "mesh is only for pipelines" in said["no pipeline"]
        assert "the mesh differs from the plan's; got 2 data x 2 pipeline" in said["another plan"]
        assert "the plan is for another world size; got 4 workers" in said["a larger plan"]
        assert "batches of different sizes; got 8 samples, 4 samples" in said["other sizes"]
        assert "batches of different sizes; got 8 samples, 4 samples" in said["other sizes later"]
        assert "the set of trainable parameters changed" in said["frozen later"]
        assert said["by its split points"] == said["by its plan"] == "trained"
