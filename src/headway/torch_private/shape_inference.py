"""Forwards by which torch's pipelines find out what stages hand on: of made-up inputs, but by the real modules."""

from __future__ import annotations

import functools
from typing import Any

import torch

from headway.torch_private.autograd import preserved_versions

_INFERENCES = ("_forward_metadata_inference", "_shape_inference")  # of torch 2.13, and of earlier ones


def leave_no_trace(stage: Any) -> None:
    """Have such forwards of ``stage`` leave buffers and random numbers as they were.

    They would count to what ``BatchNorm`` has seen, before the first step and after every switch from evaluation.
    """
    for name in _INFERENCES:
        if hasattr(stage, name):
            setattr(stage, name, functools.partial(_inferred, stage, getattr(stage, name)))


def _inferred(stage: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    kept = [(buffer, buffer.clone()) for buffer in stage.submod.buffers()]
    on = [stage.device] if stage.device.type == "cuda" else []
    with torch.random.fork_rng(devices=on):
        try:
            return original(*args, **kwargs)
        finally:
            with torch.no_grad(), preserved_versions([buffer for buffer, _ in kept]):
                for buffer, value in kept:
                    buffer.copy_(value)
