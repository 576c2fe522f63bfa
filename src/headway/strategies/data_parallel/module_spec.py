"""ModelSpec of a live module: the bridge from torch to the values that decisions are made on."""

from __future__ import annotations

from torch import nn

from headway.model import ModelSpec, ParameterSpec


def model_spec(module: nn.Module) -> ModelSpec:
    """Describe the trainable parameters of ``module``, in ``named_parameters()`` order, and its buffers."""
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
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in module.buffers()),
    )
