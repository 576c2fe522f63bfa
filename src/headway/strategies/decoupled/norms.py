"""Norms of gradients in pieces, and what clipping by them multiplies gradients by."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_EPSILON = 1e-6  # stock torch's


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
