"""What a stage is given, so that its first module may work in place (``ReLU(inplace=True)``), at no cost of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: torch.Tensor) -> torch.Tensor:
        return received.detach()  # no view, for autograd: those of a function cannot be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def changeable(given: Sequence[Any]) -> tuple[Any, ...]:
    """The same tensors in the same memory, as results of an operation where they are leaves with gradients.

    Autograd refuses to have leaves changed in place, and a stage's inputs are leaves. Nothing else reads what a stage
    has received: the stage before it has the original, and if the stage itself has saved it for its backward, autograd
    says so as it does in one process.
    """
    return tuple(
        _Same.apply(each)  # type: ignore[no-untyped-call]
        if isinstance(each, torch.Tensor) and each.requires_grad and each.is_leaf and torch.is_grad_enabled()
        else each
        for each in given
    )
