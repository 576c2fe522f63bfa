"""Decides which optimizer's steps count as the job's steps."""

from __future__ import annotations

import weakref

import torch
from torch import nn

LONGEST_WAIT = 100  # optimizer steps to wait until every wrapped model has been stepped


class StepClock:
    """Picks the optimizer whose steps are counted: the first one seen that holds the model's parameters.

    If several models were wrapped, a step is one iteration of the loop that trains all of them: nothing is counted
    until each has been stepped. Then the optimizer with the fewest steps is picked; on a tie, the recorded model's.
    """

    def __init__(self) -> None:
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._parameter_ids: frozenset[int] = frozenset()
        self._others: list[frozenset[int]] = []
        self._calls: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._chosen = False  # among optimizers of several models
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All optimizers that hold parameters of the model, including those whose steps are not counted."""
        return [
            optimizer
            for optimizer in self._seen
            if not self._parameter_ids or _holds(optimizer, self._parameter_ids)
        ]

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer whose steps are counted, if it is alive."""
        return self._optimizer() if self._optimizer is not None else None

    def model_is(self, root: nn.Module) -> None:
        """Count the steps of the optimizer of the model ``root``."""
        self._parameter_ids = _ids(root)

    def another_is(self, root: nn.Module) -> None:
        """The model ``root`` is trained as well, but not recorded."""
        self._others.append(_ids(root))

    def counts(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this step of ``optimizer`` is a step of the job."""
        self._seen.add(optimizer)
        if self._others and not self._chosen:
            return self._choose(optimizer)
        current = self.optimizer
        if current is optimizer:
            return True
        replaceable = current is None or (
            self._parameter_ids and not self._chosen and not _holds(current, self._parameter_ids)
        )
        if replaceable and (not self._parameter_ids or _holds(optimizer, self._parameter_ids)):
            self._optimizer = weakref.ref(optimizer)
            return True
        return False

    def forget(self) -> None:
        """Drop the references to optimizers."""
        self._optimizer = None
        self._seen.clear()

    def _choose(self, optimizer: torch.optim.Optimizer) -> bool:
        models = [self._parameter_ids, *self._others]
        if any(_holds(optimizer, ids) for ids in models):
            self._calls[optimizer] = self._calls.get(optimizer, 0) + 1
        waiting = any(all(not _holds(call, ids) for call in self._calls) for ids in models)
        if not self._calls or (waiting and sum(self._calls.values()) < LONGEST_WAIT):
            return False
        self._chosen = True
        chosen = min(
            self._calls,
            key=lambda candidate: (self._calls[candidate], not _holds(candidate, self._parameter_ids)),
        )
        self._optimizer = weakref.ref(chosen)
        return chosen is optimizer


def _ids(root: nn.Module) -> frozenset[int]:
    return frozenset(id(parameter) for parameter in root.parameters())


def _holds(optimizer: torch.optim.Optimizer, parameter_ids: frozenset[int]) -> bool:
    return any(id(p) in parameter_ids for group in optimizer.param_groups for p in group["params"])
