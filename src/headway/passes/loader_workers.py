"""Data loaders that get workers, live."""

from __future__ import annotations

import functools
import multiprocessing
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset


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
