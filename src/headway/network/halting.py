"""Ending measurements early: ranks stop together, between two collectives, so that none is left half way.

A rank that simply left would have the others wait in a collective, and its own threads for them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


class HaltedError(Exception):
    """Some rank was told to end: measuring stops on all of them."""


class _Wish:
    """Whether ranks ask each other, and whether this one wants to stop."""

    def __init__(self) -> None:
        self.heeded = False
        self.stop = threading.Event()


_wish = _Wish()


@contextmanager
def heeded() -> Iterator[None]:
    """Have ``stop_if_asked`` heed ``ask``, for as long as the block lasts. Every rank enters it, or none."""
    _wish.stop.clear()
    _wish.heeded = True
    try:
        yield
    finally:
        _wish.heeded = False


def ask() -> None:
    """Have all ranks stop, soon; from any thread and from signal handlers."""
    _wish.stop.set()


def stop_if_asked() -> None:
    """Raise HaltedError on all ranks where one of them was asked to stop. Every rank calls it at the same point.

    It costs a tiny collective, and nothing outside of ``heeded``.
    """
    if not _wish.heeded:
        return
    stop = torch.tensor([_wish.stop.is_set()], dtype=torch.int32, device="cpu")
    dist.all_reduce(stop, dist.ReduceOp.MAX)
    if bool(stop.item()):
        raise HaltedError
