"""Modules that are no Sequential as pipelines, traced and cut: against one process, in many ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import workers
from tests.behaviour import traced_cases as cases

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
CASES = "tests.behaviour.traced_cases"
RANKS = 3
ROUNDED = {"GPT, mixed precision": 2e-2}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return workers.run(RANKS, f"{CASES}:in_every_way", timeout_s=150)


def _are_equal(found: list[dict[str, Any]], alone: dict[str, Any], name: str) -> None:
    near = ROUNDED.get(name, 1e-12)
    for own in found:
        torch.testing.assert_close(own[name]["said"], alone["said"], rtol=near, atol=near)
        assert own[name]["state"].keys() == alone["state"].keys()
        for key, value in alone["state"].items():
            torch.testing.assert_close(own[name]["state"][key], value, rtol=near, atol=near)
        assert own[name] == found[0][name], "the same on all ranks, tied weights to the last bit"


@pytest.mark.parametrize("name", cases.WAYS)
def test_it_trains_as_one_process_does(found: list[dict[str, Any]], name: str) -> None:
    """Losses and evaluations, and the whole model's state under its own names."""
    _are_equal(found, cases.trained(name, None), name)


def test_so_do_two_ranks() -> None:
    found = workers.run(2, f"{CASES}:in_every_way", timeout_s=60)
    for name in cases.ON_TWO:
        _are_equal(found, cases.trained(name, None, cases.ON_TWO), name)


def test_so_do_pipelines_side_by_side() -> None:
    """Two pipelines of two stages."""
    found = workers.run(4, f"{CASES}:side_by_side", {"data": 2, "pipeline": 2}, timeout_s=150)
    for name in cases.SIDE_BY_SIDE:
        _are_equal(found, cases.trained(name, None, cases.SIDE_BY_SIDE, pipelines=2), name)


def test_dropout_draws_the_same_in_every_order_and_nothing_in_evaluation() -> None:
    found = workers.run(RANKS, f"{CASES}:with_dropout", timeout_s=60)
    for own in found:
        assert own["1F1B"] == own["again"] == found[0]["1F1B"]
        for order in ("GPipe", "zero-bubble"):
            torch.testing.assert_close(own[order], own["1F1B"], rtol=1e-12, atol=1e-12)
        once, again, alone = own["evaluated"]
        assert once == again
        assert once == pytest.approx(alone, rel=1e-12)
    assert found[0]["1F1B"] != cases.trained("GPT", None)["state"]


def test_what_does_not_fit_is_refused_on_every_rank() -> None:
    for rank, said in enumerate(workers.run(RANKS, f"{CASES}:refused", timeout_s=60)):
        assert "ranks disagree about how to split the model into stages" in said["other examples"]
        assert (
            "cannot split example_batch into micro-batches of equal size; got int64 [13, 6]"
            if rank == 2
            else "ranks disagree about how to split the model into stages"
        ) in said["one rank alone"]
        assert (
            "got transformr.h.2; expected names of its modules, such as transformer.h.2"
            in said["unknown point"]
        )
        assert "do not give one stage per rank" in said["one point short"]
        for which in ("another batch", "another batch in evaluation", "many inputs"):
            assert (
                "ranks disagree about the batch" if rank else "the batch does not match example_batch"
            ) in said[which]
        assert "Call parallelize, train_step and evaluate under the same torch.autocast" in said["autocast"]
        assert "requires_grad changed after" in said["unfrozen"]
