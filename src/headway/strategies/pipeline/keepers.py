"""Objects that a forward passes on and that keep tensors, as caches do: recorded calls would keep those of no batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from headway.torch_private.tracing import is_fake

_MOST = 100_000  # objects that are looked at


def objects_in(value: Any) -> Iterator[Any]:
    """The objects with attributes in nested containers; modules, tensors and functions apart."""
    left, seen = [value], set[int]()
    while left:
        each = left.pop()
        if isinstance(each, dict | list | tuple | set | frozenset):
            if id(each) not in seen:  # a container may contain itself
                seen.add(id(each))
                left += _inside(each)
        elif hasattr(each, "__dict__") and not (
            isinstance(each, torch.Tensor | nn.Module | type) or callable(each)
        ):
            yield each


def keeps_tensors(value: Any) -> bool:
    """Whether an object's attributes, or theirs, have a tensor that was computed without values."""
    left, seen = [value], set[int]()
    while left and len(seen) < _MOST:
        each = left.pop()
        if isinstance(each, torch.Tensor) and is_fake(each):
            return True
        if id(each) in seen or isinstance(each, torch.Tensor | nn.Module | type):
            continue
        seen.add(id(each))
        left += _inside(each)
    return False


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return [*value]
    return [*getattr(value, "__dict__", {}).values()]
