"""Cases written for the CPU, called in a rank whose tensors are on the GPU unless they say otherwise."""

from __future__ import annotations

import importlib
from typing import Any

import torch


def called(rank: int, world_size: int, function: str, *arguments: Any) -> Any:
    """What ``module:name`` returns there."""
    torch.cuda.set_device(0)
    torch.set_default_device("cuda")
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(rank, world_size, *arguments)
