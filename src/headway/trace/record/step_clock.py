"""Which optimizer's steps are the job's."""

from __future__ import annotations

import weakref

import torch
from torch import nn


class StepClock:
    """Picks the optimizer whose steps are counted: the first one seen that holds the model's parameters."""

    def __init__(self) -> None:
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._parameter_ids: frozenset[int] = frozenset()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The one whose steps are counted, if it is alive."""
        return self._optimizer() if self._optimizer is not None else None

    def model_is(self, root: nn.Module) -> None:
        """Count the steps of an optimizer of this model."""
        self._parameter_ids = frozenset(id(parameter) for parameter in root.parameters())

    def counts(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step of ``optimizer`` is one of the job."""
        current = self.optimizer
        if current is optimizer:
            return True
        replaceable = current is None or (self._parameter_ids and not self._holds(current))
        if replaceable and (not self._parameter_ids or self._holds(optimizer)):
            self._optimizer = weakref.ref(optimizer)
            return True
        return False

    def forget(self) -> None:
        """Let go of the optimizer."""
        self._optimizer = None

    def _holds(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(p) in self._parameter_ids for group in optimizer.param_groups for p in group["params"])
