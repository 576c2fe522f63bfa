"""Clipping by norm where gradients are sharded: norms of shards are summed, rather than every gradient fetched.

What is sharded is clipped here, once something is wrapped, and everything else by torch, at the cost of reading every
gradient. So it is where a script has imported ``clip_grad_norm_`` before that could be replaced (see ``reads``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from headway.strategies.decoupled import deferred
from headway.strategies.decoupled.condition import LOCK
from headway.strategies.decoupled.parameter_state import ParameterState
from headway.strategies.decoupled.settlement import ParameterGuard, Settlement
from headway.strategies.decoupled.sharded_gradients import ShardedGradients
from headway.strategies.live.reads import answer_clipping


def watch_clipping() -> None:
    """Clip what is sharded here from now on."""
    answer_clipping(_clipped)


def _clipped(
    parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor | None:
    with LOCK:
        sharded = sharded_gradients_of(parameters)
        if sharded is None:
            return None
        gradients, states = sharded
        return gradients.clip(states, max_norm, norm_type, error_if_nonfinite)


def sharded_gradients_of(
    parameters: Iterable[torch.Tensor],
) -> tuple[ShardedGradients, list[ParameterState]] | None:
    """The sharded gradients of the engine that all gradients of ``parameters`` are sharded in; else None.

    The answer is the same on every rank, although some may have looked at their gradients.
    """
    states: list[ParameterState] = []
    settlements: set[Settlement] = set()
    for parameter in parameters:
        guard: ParameterGuard | None = deferred.entry_of(parameter)
        if guard is None and not parameter.requires_grad and parameter.grad is None:
            continue  # frozen: the stock function passes over it, too
        if guard is None or not guard.state.sharded:
            return None
        states.append(guard.state)
        settlements.add(guard.settlement)
    if len(settlements) != 1 or len(set(states)) != len(states):
        return None
    (settlement,) = settlements
    # Of a parameter that no rank has used the shards are zeros, which change neither a norm nor themselves.
    gradients = settlement.form.sharded_gradients
    if gradients is None or settlement.layout.device.type != "cpu" or settlement.condition.filling:
        return None
    return gradients, states
