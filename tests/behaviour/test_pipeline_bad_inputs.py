"""Pipelines that are given what cannot be trained: a clear error on every rank, and nobody hangs."""

from __future__ import annotations

import pytest
import torch
from tests import workers
from tests.behaviour import bad_pipeline_cases as cases

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
CASES = "tests.behaviour.bad_pipeline_cases"


def test_all_ranks_refuse_what_one_of_them_is_given() -> None:
    for said in workers.run(3, f"{CASES}:refused", timeout_s=60):
        assert all(each.startswith("UserError: ") for each in said.values()), said
        assert "rank 0: the batch does not split into 4 micro-batches of equal size" in said["uneven batch"]
        assert "they have 2, 2, 2, 1 samples" in said["uneven batch"]
        assert "rank 0: the batch has fewer samples than 4 micro-batches" in said["small batch"]
        assert "rank 2: the target does not split" in said["uneven target"]
        assert "stages 0 and 1 disagree" in said["other shapes"]
        assert "float32 [2, 8] of stage 0" in said["other shapes"]
        assert "float32 [2, 7], which stage 1 expects" in said["other shapes"]
        assert "float64 [2, 8], which stage 1 expects" in said["other types"]


def test_a_smaller_batch_in_a_later_step_is_refused() -> None:
    """By who is given it; the others say who is gone."""
    said = [each.result for each in workers.launch(3, f"{CASES}:in_a_later_step", timeout_s=60)]
    assert "micro-batches of different shapes ([1, 8]) than in the first step ([2, 8])" in said[0], said
    assert "rank 0 has ended" in said[1], said
    assert "rank 2: the target has micro-batches of different shapes" in said[2], said


@pytest.mark.parametrize("what", ["None", "number"])
def test_stages_that_hand_on_no_tensor_are_refused(what: str) -> None:
    said = [each.result for each in workers.launch(3, f"{CASES}:hands_on", what, timeout_s=60)]
    assert said[1].startswith("UserError: stage 1 outputs something that cannot be sent"), said
    for other in (said[0], said[2]):
        assert other.startswith("CommunicationError: "), said
        assert "rank 1 has ended" in other, said


def test_stages_that_hand_on_distributed_tensors_are_refused() -> None:
    """Torch finds no mesh for what comes of it on the next stage, or we refuse: nothing is trained on empty tensors."""
    said = [each.result for each in workers.launch(3, f"{CASES}:hands_on", "DTensor", timeout_s=60)]
    assert all(each.startswith(("UserError: ", "CommunicationError: ")) for each in said), said


def test_views_are_handed_on_where_backwards_are_halved() -> None:
    found = workers.run(3, f"{CASES}:views", timeout_s=60)
    parts = torch.nn.ModuleList(cases.viewing(rank) for rank in range(3))
    data, target = cases.cubes()
    output = data
    for part in parts:
        output = part(output)
    torch.nn.functional.mse_loss(output, target).backward()
    for part, own in zip(parts, found, strict=True):
        torch.testing.assert_close(torch.tensor(own), torch.tensor(cases.gradients(part)))
