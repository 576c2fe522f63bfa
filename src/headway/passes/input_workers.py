"""The input pipeline: batches are loaded by processes of their own, ahead of the steps that need them."""

from __future__ import annotations

import functools
import multiprocessing
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import Field
from torch.utils.data import DataLoader, IterableDataset

from headway.graph.computation import Part
from headway.passes.measured import MeasuredPass
from headway.permission import RANDOMNESS
from headway.units import counted

if TYPE_CHECKING:
    from torch import nn


@dataclass
class _InForce:
    workers: int
    prefetch: int


_in_force: _InForce | None = None
_given: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()


def give_workers(workers: int, prefetch: int) -> None:
    """Have loaders of this process load with ``workers``, each ``prefetch`` batches ahead. The last call counts.

    Left as the script made them are loaders that have workers already, those of data sets that can only be iterated,
    which each worker would load as a whole, those over which a loop begins where no gradients are recorded, as in
    evaluation, and all of processes that may have no processes of their own.
    """
    global _in_force  # noqa: PLW0603 - loaders are the script's, and not known yet
    if _in_force is None:
        _watch_loaders()
    _in_force = _InForce(workers, prefetch)


def _watch_loaders() -> None:
    original: Any = DataLoader.__iter__

    @functools.wraps(original)
    def begin(self: DataLoader[Any]) -> Any:
        if _in_force is not None and _may_have_workers(self):
            self.num_workers, self.prefetch_factor = _in_force.workers, _in_force.prefetch
            self.in_order = True  # as it was without
            _given.add(self)
        return original(self)

    DataLoader.__iter__ = begin  # type: ignore[method-assign]


def _may_have_workers(loader: DataLoader[Any]) -> bool:
    return (
        (loader.num_workers == 0 or loader in _given)
        and not isinstance(loader.dataset, IterableDataset)
        and torch.is_grad_enabled()
        and not multiprocessing.current_process().daemon
    )


class InputWorkers(MeasuredPass):
    """Loaders that load in the rank's own process, of data sets that can be indexed, have ``workers`` processes.

    Samples come in the same order. What the data set draws by chance, as augmentations do, is drawn in other
    processes, and so it differs; what it remembers is forgotten with each epoch.
    """

    name: ClassVar[str] = "input"
    changes_module: ClassVar[bool] = False
    measured_by: ClassVar[str] = "python -m headway.measuring.loading TRACE [WORKERS]"
    parts: ClassVar[tuple[str, ...]] = (Part.INPUT, Part.FORWARD, Part.BACKWARD)

    workers: int = Field(ge=1, le=256)
    """How many processes load batches, for each rank."""

    prefetch: int = Field(default=2, ge=1, le=256)
    """How many batches each of them loads ahead."""

    @property
    def changes_training(self) -> str:
        """That samples are made elsewhere."""
        return "workers load batches, in which data sets draw other random numbers and keep no state"

    @property
    def permission(self) -> str:
        """What it needs."""
        return RANDOMNESS

    def apply(self, module: nn.Module, optimizer: Any) -> nn.Module:
        """``module`` itself. Loaders over which a training loop begins from now on have the workers."""
        del optimizer

        give_workers(self.workers, self.prefetch)
        return module

    def describe(self) -> str:
        """Say how many workers load how far ahead."""
        return f"{counted(self.workers, 'loader worker')}, {counted(self.prefetch, 'batch', 'batches')} ahead each"
