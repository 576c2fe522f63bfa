"""Batches split into another number of micro-batches than the script says, where its plan was made for that."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from headway.errors import PlanError
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.torch_private.pipelining import PipelineSteps

_OF_BATCHES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_STAY = "Construct the schedule with n_microbatches as planned, or plan from recordings of that number alone."


def split_as_planned(steps: PipelineSteps, strategy: PipelineStrategy) -> bool:
    """Have the script's batches split into the plan's number of micro-batches; returns whether that changes anything.

    Raises PlanError where that would change what is trained, as far as it can be told before the first step; the rest
    in the first: where the loss of several samples is not the mean of theirs.
    """
    planned = strategy.micro_batches
    if planned in (None, steps.micro_batches) or strategy.script_micro_batches != steps.micro_batches:
        return False
    assert planned is not None
    got = f"{planned} micro-batches in the plan, {steps.micro_batches} in the script"
    if why := _why_not(steps):
        raise PlanError(
            f"the number of micro-batches cannot be changed: {why}", got=got, expected="the same", fix=_STAY
        )
    steps.split_into(planned)
    steps.when_first_loss(partial(_check_mean, got))
    return True


def _why_not(steps: PipelineSteps) -> str:
    if len(steps.stages) > 1:
        return "the script's ranks have several stages"
    if not steps.divides_gradients:
        return "the script divides gradients by it itself (scale_grads=False)"
    for stage, module in steps.modules.items():
        if any(isinstance(each, _OF_BATCHES) for each in module.modules()):
            return f"BatchNorm in stage {stage} would see micro-batches of another size"
    return ""


def _check_mean(got: str, loss_of: Callable[[Any, Any], Any], output: Any, target: Any) -> None:
    """Raise PlanError unless the loss of a micro-batch is the mean of its parts', as far as the script's tells.

    torch divides gradients by the number of micro-batches. Behind a sum of losses, or a mean over what differs in
    number from sample to sample, another number of them would give other gradients.
    """
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor) and output.dim()):
        return
    rows = output.shape[0]
    if target.shape[:1] != (rows,):
        return
    if rows == 1:
        pieces = [(torch.cat([output, output]), torch.cat([target, target]))]
    else:
        cuts = (slice(0, rows // 2), slice(rows // 2, rows))
        pieces = [(output[cut], target[cut]) for cut in cuts]
    (whole, tolerance), *parts = (_loss(loss_of, *each) for each in ((output, target), *pieces))
    samples = [len(each) for each, _ in pieces]
    mean = sum(count * loss for count, (loss, _) in zip(samples, parts, strict=True)) / sum(samples)
    if abs(mean - whole) > tolerance * max(abs(mean), abs(whole)):
        raise PlanError(
            "the number of micro-batches cannot be changed: the script's loss is not a mean over samples, so gradients "
            "would differ",
            got=got, expected="a loss that is as large for a micro-batch as for its halves in the mean", fix=_STAY,
        )  # fmt: skip


def _loss(
    loss_of: Callable[[Any, Any], Any], output: torch.Tensor, target: torch.Tensor
) -> tuple[float, float]:
    """The loss, without gradients, and as if no random numbers were drawn, with how exact it is.

    It is not a number where a script has none of such a size.
    """
    device = output.device
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            loss = torch.as_tensor(loss_of(output, target))
            exact = max(torch.finfo(each.dtype).eps for each in (output, loss))
            return float(loss), max(1e-3, exact**0.5)
        except Exception:  # a script's own function, given what it was not written for
            return math.nan, 0.0
