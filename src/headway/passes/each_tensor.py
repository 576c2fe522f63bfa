"""The tensors in what a module is given and puts out."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch


def each_tensor(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with its tensors changed, in tuples, lists, dicts and data classes within each other.

    What is none of these stays as it is, caches of attention among it.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [each_tensor(each, change) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [each_tensor(each, change) for each in value]
    if isinstance(value, dict):  # copied, for those of transformers are more than that
        changed = copy.copy(value)
        for key, each in value.items():
            changed[key] = each_tensor(each, change)
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        like: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(like, field.name, each_tensor(getattr(value, field.name), change))
        return like
    return value
