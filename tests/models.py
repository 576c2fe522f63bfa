"""Model specs for tests."""

from __future__ import annotations

from headway.model import ModelSpec, ParameterSpec


def layered_model(layers: int = 4, numel: int = 1000, dtype: str = "float32") -> ModelSpec:
    """Layers of one weight and one small bias, used forwards and made ready backwards."""
    parameters = []
    for index in range(layers):
        parameters.append(
            ParameterSpec(name=f"layer{index}.weight", shape=(numel,), dtype=dtype, module=f"layer{index}")
        )
        parameters.append(
            ParameterSpec(name=f"layer{index}.bias", shape=(10,), dtype=dtype, module=f"layer{index}")
        )
    return ModelSpec(
        parameters=tuple(parameters),
        forward_order=tuple(f"layer{index}" for index in range(layers)),
        ready_order=tuple(
            f"layer{index}.{kind}" for index in reversed(range(layers)) for kind in ("bias", "weight")
        ),
    )
