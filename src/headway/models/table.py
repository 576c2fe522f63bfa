"""LayerTable: a model as its layers in forward order, their parameters and their work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from headway.model import ModelSpec, ParameterSpec, PassMemory

FLOAT_BYTES = 4
"""All tables are of single precision, as the published benchmarks that use these models."""


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
    """What a forward does: floating-point operations, bytes to and from memory, kernels launched.

    ``kept_bytes`` are what it leaves for backward, of which ``single_bytes`` stay as they are in mixed precision: what
    normalisation, softmax and losses keep, and masks.
    """

    flops: float = 0.0
    moved_bytes: float = 0.0
    kernels: int = 0
    kept_bytes: float = 0.0
    single_bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.moved_bytes + other.moved_bytes,
            self.kernels + other.kernels,
            self.kept_bytes + other.kept_bytes,
            self.single_bytes + other.single_bytes,
        )

    def halved(self, parameter_bytes: float) -> Work:
        """The same in mixed precision, of a layer with parameters of so many bytes in single precision.

        Activations have half the bytes. Parameters stay as they are: each forward reads them, writes a copy of half
        the size, and leaves that copy for backward.
        """
        return Work(
            self.flops,
            self.moved_bytes / 2 + 1.5 * parameter_bytes,
            self.kernels,
            (self.kept_bytes + self.single_bytes + parameter_bytes) / 2,
            self.single_bytes,
        )


def at_batch(values: Mapping[int, float], samples: int) -> float:
    """What a cost is for a batch of ``samples``, from its ``values`` at two batch sizes.

    It is a line through both, a fixed part and one in proportion to the samples. Where noise makes the line fall, or
    begin below zero, it is bent so that no batch costs less than nothing.
    """
    (few, low), (many, high) = sorted(values.items())
    line = low + (high - low) * (samples - few) / (many - few)
    if high < low:
        return max(line, high)
    return max(line, samples * low / few) if low * many < high * few else line


@dataclass(frozen=True, slots=True)
class Layer:
    """A module that owns parameters, with its forward's work for the table's batch.

    What follows a module and owns nothing (activations, pooling, attention scores) is counted with it. ``tied`` holds
    full names of parameters of other layers that it also uses; their gradient is complete after both have run.
    ``cut_bytes`` is what the whole batch passes on if the model is cut behind it; 0 where it is not to be cut.
    """

    name: str
    parameters: tuple[Parameter, ...]
    work: Work
    tied: tuple[str, ...] = ()
    cut_bytes: float = 0.0

    def full_name(self, parameter: Parameter) -> str:
        """The name of one of its parameters in the whole model."""
        return f"{self.name}.{parameter.name}"

    def halved(self) -> Layer:
        """The same layer in mixed precision: its parameters and their gradients stay in single precision."""
        own_bytes = FLOAT_BYTES * sum(parameter.numel for parameter in self.parameters)
        return replace(self, work=self.work.halved(own_bytes), cut_bytes=self.cut_bytes / 2)


@dataclass(frozen=True)
class LayerTable:
    """A model's layers in forward order, which is the order of registration too.

    ``batch`` says for which input the work was counted, ``samples`` how many samples that is.
    """

    name: str
    batch: str
    samples: int
    layers: tuple[Layer, ...] = field(repr=False)

    def halved(self) -> LayerTable:
        """The same model in mixed precision."""
        return replace(self, layers=tuple(layer.halved() for layer in self.layers))

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Every parameter under its full name, each once."""
        return {layer.full_name(p): p for layer in self.layers for p in layer.parameters}

    @property
    def parameter_count(self) -> int:
        """The number of trainable scalars."""
        return sum(parameter.numel for parameter in self.parameters.values())

    @property
    def work(self) -> Work:
        """One forward's work."""
        return sum((layer.work for layer in self.layers), Work())

    @property
    def spec(self) -> ModelSpec:
        """The model as communication decisions see it, with the orders of its forward and backward."""
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
        """While backward is at a layer, gradients of what that kept are there besides."""
        kept_bytes = [round(layer.work.kept_bytes) for layer in self.layers]
        held_bytes = forward_bytes = sum(kept_bytes)
        backward: list[tuple[str, int]] = []
        for layer, own_bytes in zip(reversed(self.layers), reversed(kept_bytes), strict=True):
            working_bytes = held_bytes + own_bytes
            backward += [(layer.full_name(p), working_bytes) for p in reversed(layer.parameters)]
            held_bytes -= own_bytes
        return PassMemory(forward_bytes=forward_bytes, backward=tuple(backward)) if forward_bytes else None
