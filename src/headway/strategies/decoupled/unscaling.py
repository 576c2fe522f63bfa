"""Unscaling where gradients are sharded: each rank unscales its shards, rather than fetch every gradient.

What is not sharded is left to ``GradScaler``, which unscales in ``unscale_`` or in ``step``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from headway.strategies.decoupled.clipping import sharded_gradients_of
from headway.strategies.decoupled.condition import LOCK
from headway.strategies.live.reads import answer_unscaling


def watch_unscaling() -> None:
    """Unscale what is sharded here from now on."""
    answer_unscaling(_unscaled)


def _unscaled(
    optimizer: Optimizer, inverse_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
) -> Any:
    """Whether any gradient is not finite, by device; None where the stock method has to do it."""
    with LOCK:
        sharded = sharded_gradients_of([p for group in optimizer.param_groups for p in group["params"]])
        if sharded is None or found_inf.device.type != "cpu":
            return None
        gradients, states = sharded
        if not allow_fp16 and any(state.parameter.dtype == torch.float16 for state in states):
            return None  # the stock method refuses them
        gradients.unscale(states, inverse_scale, found_inf)
        return {found_inf.device: found_inf}
