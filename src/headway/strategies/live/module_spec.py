"""ModelSpec of a live module: the bridge from torch to the values that decisions are made on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from headway.errors import UnsupportedError
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


def check_dense_gradients(module: nn.Module, fix: str) -> None:
    """Raise UnsupportedError, naming the module, where one gives sparse gradients. ``fix`` says what to use instead."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse and child.weight.requires_grad:
            raise UnsupportedError(
                "sparse gradients are not supported", got=f"{name or type(child).__name__}, with sparse=True",
                expected="sparse=False", fix=fix,
            )  # fmt: skip


def _size_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)
