"""Data loaders that get workers, live."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from headway.errors import UnsupportedError


@dataclass
class _InForce:
    workers: int
    prefetch: int


_in_force: _InForce | None = None


def give_workers(workers: int, prefetch: int) -> None:
    """Have every loader of this process load with ``workers``, each ``prefetch`` batches ahead, from its next epoch on.

    The last call counts. Loaders within workers are left alone, for these may have no processes of their own.
    """
    global _in_force  # noqa: PLW0603 - loaders are the script's, and not known yet
    if _in_force is None:
        _watch_loaders()
    _in_force = _InForce(workers, prefetch)


def _watch_loaders() -> None:
    original: Any = DataLoader.__iter__

    @functools.wraps(original)
    def begin(self: DataLoader[Any]) -> Any:
        if _in_force is not None and get_worker_info() is None:
            if isinstance(self.dataset, IterableDataset):
                raise UnsupportedError(
                    "a data set that can only be iterated would be loaded by each worker as a whole",
                    got=type(self.dataset).__name__, expected="a data set with __getitem__ and __len__",
                    fix="Leave the pass input out of the plan.",
                )  # fmt: skip
            self.num_workers, self.prefetch_factor = _in_force.workers, _in_force.prefetch
        return original(self)

    DataLoader.__iter__ = begin  # type: ignore[method-assign]
