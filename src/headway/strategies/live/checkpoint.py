"""Checkpoints of one worker: its model, optimizer, iteration and random numbers, as ``torch.save`` takes them.

Everything is tensors, numbers, strings, lists and tuples, so ``torch.load(..., weights_only=True)`` reads it back.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from headway.errors import UserError

KIND = "headway worker"


def saved(module: nn.Module, optimizer: Optimizer | None, iteration: int) -> dict[str, Any]:
    """All that a worker needs to go on as if it had not stopped."""
    return {
        "kind": KIND,
        "iteration": iteration,
        "model": module.state_dict(),
        "optimizer": optimizer.state_dict() if optimizer is not None else None,
        "random": _random_states(),
    }


def restore(state: Mapping[str, Any], module: nn.Module, optimizer: Optimizer | None) -> int:
    """Put ``saved`` state back; returns the iteration. Raises UserError where it is no checkpoint of this model."""
    if not isinstance(state, Mapping) or state.get("kind") != KIND or type(state.get("iteration")) is not int:
        raise UserError(
            "this is no checkpoint of a worker", got=type(state).__name__,
            expected="what checkpoint() of the wrapped model returned",
        )  # fmt: skip
    if optimizer is None and state["optimizer"] is not None:
        raise UserError(
            "the optimizer is not known yet",
            fix="Pass optimizer= when the model is wrapped, or step once before.",
        )
    try:
        module.load_state_dict(state["model"])
    except RuntimeError as error:
        raise UserError("the checkpoint is of another model", got=str(error)) from error
    if optimizer is not None and state["optimizer"] is not None:
        optimizer.load_state_dict(state["optimizer"])
    _set_random_states(state["random"])
    return int(state["iteration"])


def _random_states() -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        import numpy as np

        name, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
        found["numpy"] = [str(name), [int(key) for key in keys], int(place), int(has_gauss), float(gauss)]
    return found


def _set_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
    if "numpy" in states:
        import numpy as np

        name, keys, *rest = states["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
