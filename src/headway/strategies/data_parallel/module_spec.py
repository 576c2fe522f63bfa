"""ModelSpec of a live module: the bridge from torch to the values that decisions are made on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from headway.model import ModelSpec, ParameterSpec


def model_spec(module: nn.Module) -> ModelSpec:
    """Describe the trainable parameters of ``module``, in ``named_parameters()`` order.

    Of frozen ones and of buffers only the size is told.
    """
    return ModelSpec(
        parameters=tuple(
            ParameterSpec(
                name=name,
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype).removeprefix("torch."),
                module=name.rpartition(".")[0],
            )
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ),
        buffer_bytes=_size_bytes(module.buffers()),
        frozen_bytes=_size_bytes(each for each in module.parameters() if not each.requires_grad),
    )


def _size_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)
