"""The outer optimizer of DiLoCo (Douillard et al., 2023, algorithm 1): SGD on what a period changes in the mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headway import torch_private
from headway.errors import UserError
from headway_baselines.local_sgd.schedule import OuterStep


class OuterOptimizer:
    """Flat copies of the parameters that a period begins with, and a ``torch.optim.SGD`` that updates them.

    Its gradient is what they were minus the mean that ranks end the period with. All ranks compute the same.
    """

    def __init__(self, step: OuterStep, begun_with: Sequence[torch.Tensor]) -> None:
        self._parameters = [torch.nn.Parameter(each.clone()) for each in begun_with]
        self._sgd = torch.optim.SGD(
            self._parameters, step.learning_rate, step.momentum, nesterov=step.nesterov
        )
        # Whoever watches the optimizers of the job is not to take this for one of them.
        self._step = torch_private.unhooked_step(torch.optim.SGD)

    def begins_with(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the period begins with just these."""
        own = self._parameters
        return [each.dtype for each in own] == [each.dtype for each in parameters] and all(
            map(torch.equal, own, parameters)
        )

    def step(self, means: Sequence[torch.Tensor]) -> None:
        """Put what the next period begins with in the place of ``means``, the parameters averaged."""
        with torch.no_grad():
            for own, mean in zip(self._parameters, means, strict=True):
                own.grad = torch.sub(own, mean, out=mean)
        self._step(self._sgd)
        with torch.no_grad():
            for own, mean in zip(self._parameters, means, strict=True):
                own.grad = None
                mean.copy_(own)

    def state_dict(self) -> dict[str, Any]:
        """What the period began with and SGD's state, as ``torch.save`` takes it."""
        return {"begun_with": [each.detach() for each in self._parameters], "sgd": self._sgd.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()``. Raises UserError where it is of another model."""
        begun_with = state["begun_with"]
        shapes = [each.shape for each in begun_with]
        if shapes != [each.shape for each in self._parameters]:
            raise UserError("the outer optimizer's state is of another model", got=shapes)
        with torch.no_grad():
            for own, saved in zip(self._parameters, begun_with, strict=True):
                own.copy_(saved)
        self._sgd.load_state_dict(dict(state["sgd"]))
