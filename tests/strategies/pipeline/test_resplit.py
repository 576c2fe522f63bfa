"""Which scripts' batches may be split into another number of micro-batches than they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from headway.errors import PlanError
from headway.strategies.pipeline.plugin import split_as_planned
from headway.strategies.pipeline.policy import PipelineStrategy

PLANNED = PipelineStrategy(micro_batches=2, script_micro_batches=8)


class Steps:
    """A script's schedule with eight micro-batches, as far as it is asked."""

    def __init__(self, *modules: nn.Module, divides: bool = True) -> None:
        self.micro_batches = 8
        self.modules = dict(enumerate(modules or (nn.Linear(2, 2),)))
        self.stages = self.modules
        self.divides_gradients = divides
        self.check: Callable[..., object] | None = None

    def split_into(self, count: int) -> None:
        self.micro_batches = count

    def when_first_loss(self, check: Callable[..., object]) -> None:
        self.check = check


def split(steps: Any, strategy: PipelineStrategy = PLANNED) -> bool:
    return split_as_planned(steps, strategy)


def test_batches_are_split_where_the_plan_was_made_for_the_script() -> None:
    steps = Steps()
    assert split(steps)
    assert steps.micro_batches == 2
    for strategy in (
        PipelineStrategy(micro_batches=8, script_micro_batches=4),
        PipelineStrategy(micro_batches=2, script_micro_batches=4),
        PipelineStrategy(micro_batches=2),
        PipelineStrategy(script_micro_batches=8),
    ):
        steps = Steps()
        assert not split(steps, strategy)
        assert steps.micro_batches == 8


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        (Steps(nn.Linear(2, 2), nn.Linear(2, 2)), "several stages"),
        (Steps(divides=False), "scale_grads=False"),
        (Steps(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))), "BatchNorm in stage 0"),
    ],
)
def test_what_would_train_otherwise_is_refused(steps: Steps, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        split(steps)
    assert steps.micro_batches == 8


def ignoring(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Without the first sample of a batch, whose target is negative."""
    return (output - target)[target.sum(-1) > -20].abs().mean()


LOSSES: dict[str, tuple[Callable[..., Any], bool]] = {
    "mean": (nn.functional.mse_loss, True),
    "mean of rows": (lambda one, other: (one - other).norm(dim=-1).mean(), True),
    "in bfloat16": (lambda one, other: nn.functional.mse_loss(one.bfloat16(), other.bfloat16()), True),
    "not of such a size": (lambda one, other: nn.functional.mse_loss(one.view(8, 5), other), True),
    "not a number": (lambda one, _: one.mean() * float("nan"), True),
    "sum": (nn.MSELoss(reduction="sum"), False),
    "of the batch": (lambda one, other: (one @ other.T).softmax(-1).diagonal().sum(), False),
    "of some samples": (ignoring, False),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("rows", [8, 5])
def test_a_loss_must_be_a_mean_over_samples(name: str, rows: int) -> None:
    loss, is_mean = LOSSES[name]
    steps = Steps()
    split(steps)
    assert steps.check is not None
    torch.manual_seed(3)
    output, target = torch.randn(rows, 5), torch.randn(rows, 5)
    target[0] = -10
    before = torch.get_rng_state()
    if is_mean:
        steps.check(loss, output, target)
    else:
        with pytest.raises(PlanError, match="not a mean over samples"):
            steps.check(loss, output, target)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_loss_of_one_sample_is_that_of_two_equal_ones() -> None:
    steps = Steps()
    split(steps)
    assert steps.check is not None
    output, target = torch.randn(1, 5), torch.randn(1, 5)
    steps.check(nn.functional.mse_loss, output, target)
    with pytest.raises(PlanError, match="not a mean"):
        steps.check(nn.MSELoss(reduction="sum"), output, target)
