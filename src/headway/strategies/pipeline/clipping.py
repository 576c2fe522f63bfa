"""torch's own clipping of a stage's gradients: by itself it would clip every stage by a norm of its own."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from headway.errors import UnsupportedError
from headway.strategies.live.reads import answer_clipping


class Clips(Protocol):
    """A model in stages."""

    @property
    def own_parameters(self) -> Sequence[nn.Parameter]:
        """Those of this rank's stage."""

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip by the norm over all stages."""


_models: weakref.WeakSet[Clips] = weakref.WeakSet()


def watch_clipping(model: Clips) -> None:
    """Have ``torch.nn.utils.clip_grad_norm_`` of the parameters of ``model`` clip by the norm over all stages."""
    _models.add(model)
    answer_clipping(_clipped, whole=True)  # replicas know the norm of a stage alone


def _clipped(
    parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float, _error_if_nonfinite: bool
) -> torch.Tensor | None:
    """The norm over all stages; None for parameters of none. Raises UnsupportedError for some of a stage's alone."""
    given = {id(each) for each in parameters}
    for model in list(_models):
        own = {id(each) for each in model.own_parameters}
        if own.isdisjoint(given):
            continue
        if norm_type != 2 or own != given:
            raise UnsupportedError(
                "gradients of a pipeline can be clipped by the 2-norm of all of them alone",
                got=f"{len(own & given)} of the {len(own)} parameters of a stage, norm_type={norm_type:g}",
                fix="Call clip_grad_norm_(max_norm) of the model.",
            )
        return model.clip_grad_norm_(max_norm)
    return None
