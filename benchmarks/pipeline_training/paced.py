"""Stages that sleep: their messages are real, and both halves of their backwards take a time of their own."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn


class _Sleeps(torch.autograd.Function):
    """Hands on what it is given, after a sleep each way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return gradients[0].clone(), None, None


def _slept(x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
    out: torch.Tensor = _Sleeps.apply(x, forward_s, backward_s)  # type: ignore[no-untyped-call]
    return out


class PacedStage(nn.Module):
    """A forward takes ``forward_s``, and the gradients of its input and those of its parameters as long each.

    What it puts out has ``factor`` times the columns of what it is given, or that fraction of them.
    """

    def __init__(self, forward_s: float, factor: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self._forward_s, self._factor = forward_s, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = _slept(x * _slept(self.weight, 0.0, self._forward_s), self._forward_s, self._forward_s)
        columns = round(x.shape[-1] * self._factor)
        # Not a view: torch cannot halve the backward of a stage that puts one out.
        return out if columns == x.shape[-1] else out[..., :columns].clone()
