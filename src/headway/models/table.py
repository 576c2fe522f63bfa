"""Describes a model as a table of layers in forward order, with their parameters and work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from headway.model import ModelSpec, ParameterSpec, PassMemory

FLOAT_BYTES = 4
"""All tables use single precision, like the published benchmarks with these models."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One trainable tensor. ``name`` is relative to its layer."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a forward: floating-point operations, bytes moved, kernels launched.

    ``kept_bytes`` is what it saves for backward. ``single_bytes`` of them do not shrink in mixed precision: masks, and
    what normalisation, softmax and losses save.
    """

    flops: float = 0.0
    moved_bytes: float = 0.0
    kernels: int = 0
    kept_bytes: float = 0.0
    single_bytes: float = 0.0

    def __add__(self, addend: Work) -> Work:
        return Work(
            self.flops + addend.flops,
            self.moved_bytes + addend.moved_bytes,
            self.kernels + addend.kernels,
            self.kept_bytes + addend.kept_bytes,
            self.single_bytes + addend.single_bytes,
        )

    def halved(self, parameter_bytes: float) -> Work:
        """The work in mixed precision, of a layer with ``parameter_bytes`` in single precision.

        Activations take half the bytes. Parameters stay in single precision: each forward reads them, writes a copy of
        half the size, and saves that copy for backward.
        """
        return Work(
            self.flops,
            self.moved_bytes / 2 + 1.5 * parameter_bytes,
            self.kernels,
            (self.kept_bytes + self.single_bytes + parameter_bytes) / 2,
            self.single_bytes,
        )


def at_batch(values: Mapping[int, float], samples: int) -> float:
    """Interpolate a cost linearly at a batch of ``samples``, from its ``values`` at two batch sizes.

    If noise makes the line fall or start below zero, it is bent so that costs stay positive.
    """
    (few, low), (many, high) = sorted(values.items())
    line = low + (high - low) * (samples - few) / (many - few)
    if high < low:
        return max(line, high)
    return max(line, samples * low / few) if low * many < high * few else line


@dataclass(frozen=True, slots=True)
class Layer:
    """A module that owns parameters, with the work of its forward for the table's batch.

    Operations without parameters (activations, pooling, attention scores) count with the module before them. ``tied``
    has the full names of other layers' parameters that it also uses. ``cut_bytes`` is the size of its output for the
    full batch if the model may be split after it, else 0.
    """

    name: str
    parameters: tuple[Parameter, ...]
    work: Work
    tied: tuple[str, ...] = ()
    cut_bytes: float = 0.0

    def full_name(self, parameter: Parameter) -> str:
        """The full name of a parameter in the model."""
        return f"{self.name}.{parameter.name}"

    def halved(self) -> Layer:
        """The layer in mixed precision; parameters and their gradients stay in single precision."""
        own_bytes = FLOAT_BYTES * sum(parameter.numel for parameter in self.parameters)
        return replace(self, work=self.work.halved(own_bytes), cut_bytes=self.cut_bytes / 2)


@dataclass(frozen=True)
class LayerTable:
    """A model's layers in forward order, which is also the order of registration.

    ``batch`` describes the input that the work is for, ``samples`` is its number of samples.
    """

    name: str
    batch: str
    samples: int
    layers: tuple[Layer, ...] = field(repr=False)

    def halved(self) -> LayerTable:
        """The model in mixed precision."""
        return replace(self, layers=tuple(layer.halved() for layer in self.layers))

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """The parameters by full name, without duplicates."""
        return {layer.full_name(p): p for layer in self.layers for p in layer.parameters}

    @property
    def parameter_count(self) -> int:
        """The number of trainable scalars."""
        return sum(parameter.numel for parameter in self.parameters.values())

    @property
    def work(self) -> Work:
        """The work of one forward."""
        return sum((layer.work for layer in self.layers), Work())

    @property
    def spec(self) -> ModelSpec:
        """The model specification, with the orders of forward and backward."""
        parameters = tuple(
            ParameterSpec(name=layer.full_name(p), shape=p.shape, dtype="float32", module=layer.name)
            for layer in self.layers
            for p in layer.parameters
        )
        return ModelSpec(
            parameters=parameters,
            forward_order=tuple(layer.name for layer in self.layers),
            ready_order=tuple(p.name for p in reversed(parameters)),
            pass_memory=self._pass_memory(),
        )

    def _pass_memory(self) -> PassMemory | None:
        """The memory over a pass; while backward is at a layer, gradients of its saved tensors also exist."""
        kept_bytes = [round(layer.work.kept_bytes) for layer in self.layers]
        held_bytes = forward_bytes = sum(kept_bytes)
        backward: list[tuple[str, int]] = []
        for layer, own_bytes in zip(reversed(self.layers), reversed(kept_bytes), strict=True):
            working_bytes = held_bytes + own_bytes
            backward += [(layer.full_name(p), working_bytes) for p in reversed(layer.parameters)]
            held_bytes -= own_bytes
        return PassMemory(forward_bytes=forward_bytes, backward=tuple(backward)) if forward_bytes else None
