"""The tensors in what a module is given and puts out."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch


def each_tensor(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with its tensors changed, in tuples, lists, dicts and data classes within each other.

    What is none of these, caches of attention among it, and what has no tensor that changes, is the same object.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        items = [each_tensor(each, change) for each in value]
        if all(one is other for one, other in zip(items, value, strict=True)):
            return value
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict):  # copied, for those of transformers are more than that
        found = {key: each_tensor(each, change) for key, each in value.items()}
        if all(each is value[key] for key, each in found.items()):
            return value
        changed = copy.copy(value)
        for key, each in found.items():
            changed[key] = each
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        held = {name: each_tensor(getattr(value, name), change) for name in names}
        if all(each is getattr(value, name) for name, each in held.items()):
            return value
        like: Any = copy.copy(value)
        for name, each in held.items():
            object.__setattr__(like, name, each)
        return like
    return value
