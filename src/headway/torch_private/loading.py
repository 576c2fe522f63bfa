"""Data loaders."""

from __future__ import annotations

from torch.utils.data.dataloader import _BaseDataLoaderIter


def data_loader_iterator() -> type:
    """The base class of the data loader's iterators, whose ``__next__`` is the wait for input."""
    return _BaseDataLoaderIter
