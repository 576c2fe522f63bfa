"""Clipping by norm where gradients are sharded: norms of shards are summed, rather than every gradient fetched.

What is sharded is clipped here, once something is wrapped, and everything else by torch, at the cost of reading every
gradient. So it is where a script has imported ``clip_grad_norm_`` before that could be replaced (see ``reads``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from headway.strategies.data_parallel.decoupled import deferred
from headway.strategies.data_parallel.decoupled.parameter_state import ParameterState
from headway.strategies.data_parallel.reads import answer_clipping

_EPSILON = 1e-6  # stock torch's


def watch_clipping() -> None:
    """Clip what is sharded here from now on."""
    answer_clipping(_clipped)


def _clipped(
    parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor | None:
    slots = sharded_parameters(parameters)
    if slots is None:
        return None
    gradients = slots[0].engine.form.sharded_gradients
    assert gradients is not None
    return gradients.clip(slots, max_norm, norm_type, error_if_nonfinite)


def sharded_parameters(parameters: Iterable[torch.Tensor]) -> list[ParameterState] | None:
    """The slots of ``parameters`` where all their gradients are one engine's sharded ones; else None.

    The answer is the same on every rank, although some may have looked at their gradients.
    """
    slots: list[ParameterState] = []
    for parameter in parameters:
        slot: ParameterState | None = deferred.entry_of(parameter)
        if slot is None and not parameter.requires_grad and parameter.grad is None:
            continue  # frozen: the stock function passes over it, too
        if slot is None or not slot.sharded:
            return None
        slots.append(slot)
    engines = {slot.engine for slot in slots}
    if len(engines) != 1 or len(set(slots)) != len(slots):
        return None
    (engine,) = engines
    # Of a parameter that no rank has used the shards are zeros, which change neither a norm nor themselves.
    whole = engine.form.sharded_gradients is None or engine.wiring.device.type != "cpu"
    return None if whole or engine.running else slots


def coefficient(
    norm: torch.Tensor, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """What gradients of this total norm are multiplied by, as stock torch has it.

    Raises RuntimeError, as stock torch does, for a norm that is not finite where that is asked for.
    """
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    return torch.clamp(max_norm / (norm + _EPSILON), max=1.0)


def norm_of(pieces: Iterable[torch.Tensor], norm_type: float) -> float:
    """The norm of all ``pieces`` together, in double precision."""
    norms = [float(torch.linalg.vector_norm(p, norm_type, dtype=torch.float64)) for p in pieces if p.numel()]
    return joined(torch.tensor(norms, dtype=torch.float64, device="cpu"), norm_type)


def joined(norms: torch.Tensor, norm_type: float) -> float:
    """The norm of vectors whose norms are given."""
    return float(torch.linalg.vector_norm(norms, norm_type)) if norms.numel() else 0.0
