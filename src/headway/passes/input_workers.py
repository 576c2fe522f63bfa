"""The input pipeline: loads batches in worker processes, ahead of the steps that need them."""

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
class _WorkerSettings:
    workers: int
    prefetch: int


_worker_settings: _WorkerSettings | None = None
_loaders_with_workers: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()


def give_workers(workers: int, prefetch: int) -> None:
    """Give loaders of this process ``workers``, each with ``prefetch`` batches ahead. The last call counts.

    Unchanged are loaders with workers, loaders of iterable data sets (each worker would load all of it), loops without
    gradients (evaluation), and all loaders of daemonic processes, which cannot have children.
    """
    global _worker_settings  # noqa: PLW0603 - the script creates loaders later
    if _worker_settings is None:
        _watch_loaders()
    _worker_settings = _WorkerSettings(workers, prefetch)


def _watch_loaders() -> None:
    original: Any = DataLoader.__iter__

    @functools.wraps(original)
    def begin(self: DataLoader[Any]) -> Any:
        if _worker_settings is not None and _may_have_workers(self):
            self.num_workers, self.prefetch_factor = _worker_settings.workers, _worker_settings.prefetch
            self.in_order = True  # as without workers
            _loaders_with_workers.add(self)
        return original(self)

    DataLoader.__iter__ = begin  # type: ignore[method-assign]


def _may_have_workers(loader: DataLoader[Any]) -> bool:
    return (
        (loader.num_workers == 0 or loader in _loaders_with_workers)
        and not isinstance(loader.dataset, IterableDataset)
        and torch.is_grad_enabled()
        and not multiprocessing.current_process().daemon
    )


class InputWorkers(MeasuredPass):
    """Gives ``workers`` processes to loaders of map-style data sets that have none.

    Samples keep their order. Data sets draw different random numbers (as for augmentation), because they do so in
    other processes, and lose their state with each epoch.
    """

    name: ClassVar[str] = "input"
    changes_module: ClassVar[bool] = False
    parts: ClassVar[tuple[str, ...]] = (Part.INPUT, Part.FORWARD, Part.BACKWARD)

    workers: int = Field(ge=1, le=256)
    """The number of worker processes per loader and rank."""

    prefetch: int = Field(default=2, ge=1, le=256)
    """The number of batches that each worker loads ahead."""

    @property
    def changes_training(self) -> str:
        """Data sets run in worker processes."""
        return "data sets run in worker processes: they draw different random numbers and lose their state"

    @property
    def permission(self) -> str:
        """The permission to change random numbers."""
        return RANDOMNESS

    def apply(self, module: nn.Module, optimizer: Any) -> nn.Module:
        """Give the workers to loaders of training loops that begin from now on; returns ``module``."""
        del optimizer

        give_workers(self.workers, self.prefetch)
        return module

    def describe(self) -> str:
        """The numbers of workers and of batches ahead, in words."""
        return f"{counted(self.workers, 'loader worker')}, {counted(self.prefetch, 'batch', 'batches')} ahead each"
