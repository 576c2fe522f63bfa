"""Reads layer tables: YAML files that describe a model by the times or the work of its layers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from headway import files
from headway.errors import UserError
from headway.graph.step_layout import LayerTimes
from headway.model import DTYPE_BYTES, MAX_NUMEL, ModelSpec, ParameterSpec
from headway.models.roofline import Device
from headway.models.table import FLOAT_BYTES, Work, at_batch

Amount = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Samples = Annotated[int, Field(ge=1, le=10**9)]
VALUE, BY_BATCH = "a number", "by batch"
TWO = Field(min_length=2, max_length=2)
EITHER = Discriminator(lambda value: BY_BATCH if isinstance(value, dict) else VALUE)
AmountByBatch = Annotated[
    Annotated[Amount, Tag(VALUE)] | Annotated[dict[Samples, Amount], TWO, Tag(BY_BATCH)], EITHER
]
MillisecondsByBatch = Annotated[
    Annotated[Milliseconds, Tag(VALUE)] | Annotated[dict[Samples, Milliseconds], TWO, Tag(BY_BATCH)], EITHER
]
Dimension = Annotated[int, Field(ge=0, le=MAX_NUMEL)]
MAX_LAYERS = 100_000


class LayerRow(BaseModel):
    """One layer: parameter shapes by name, and its times (ms) or its work for the table's batch.

    Times and work may be given for two batch sizes (samples -> value), which reveals their fixed part.

    ``tied`` lists the full names of other layers' parameters that it also uses. ``kept_bytes`` is the memory that its
    forward saves for backward. ``cut_bytes`` is the size of its output; a pipeline may be split after layers that set it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=500)
    parameters: dict[str, Annotated[tuple[Dimension, ...], Field(max_length=64)]] = Field(
        default={}, max_length=10_000
    )
    tied: tuple[str, ...] = Field(default=(), max_length=10_000)
    forward_ms: MillisecondsByBatch | None = None
    backward_ms: MillisecondsByBatch | None = None
    flops: AmountByBatch | None = None
    moved_bytes: AmountByBatch = 0.0
    kernels: int = Field(default=1, ge=0, le=10**6)
    kept_bytes: int = Field(default=0, ge=0, le=10**15)
    cut_bytes: int = Field(default=0, ge=0, le=10**15)

    @model_validator(mode="after")
    def _times_or_work(self) -> Self:
        if (self.forward_ms is None) == (self.flops is None):
            raise ValueError(f"layer {self.name!r} needs either forward_ms or flops")
        if self.backward_ms is not None and isinstance(self.backward_ms, dict) != self.is_by_batch:
            raise ValueError(f"layer {self.name!r} needs both times for two batch sizes, or neither")
        for name, shape in self.parameters.items():
            if math.prod(shape) > MAX_NUMEL:
                raise ValueError(
                    f"parameter {name!r} of layer {self.name!r} has more than {MAX_NUMEL} elements"
                )
        return self

    @property
    def is_by_batch(self) -> bool:
        """Whether the time is given for two batch sizes."""
        return isinstance(self.forward_ms, dict)

    @property
    def numel(self) -> int:
        """The number of parameter elements."""
        return sum(math.prod(shape) for shape in self.parameters.values())


class TableFile(BaseModel):
    """A model for a batch of ``samples``, with its layers in the order of forward."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    name: str = Field(min_length=1, max_length=200)
    samples: int = Field(ge=1, le=10**9)
    dtype: str = "float32"
    activation_bytes: int = Field(default=0, ge=0, le=10**15)
    layers: tuple[LayerRow, ...] = Field(min_length=1, max_length=MAX_LAYERS)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        names = [layer.name for layer in self.layers]
        if len(set(names)) != len(names):
            raise ValueError("duplicate layer names")
        full = [f"{layer.name}.{name}" for layer in self.layers for name in layer.parameters]
        unique = set(full)
        if len(unique) != len(full):
            raise ValueError("two parameters have the same full name, LAYER.PARAMETER")
        for layer in self.layers:
            for name in layer.tied:
                if name not in unique:
                    raise ValueError(f"layer {layer.name!r} is tied to an unknown parameter: {name!r}")
        if not unique:
            raise ValueError("no layer has parameters, so nothing is trained")
        return self

    @property
    def needs_device(self) -> bool:
        """Whether a device is needed to turn work into times."""
        return any(layer.forward_ms is None for layer in self.layers)

    @property
    def fixed_part_is_unknown(self) -> bool:
        """Whether times at another batch are guessed in proportion to the samples."""
        return any(layer.forward_ms is not None and not layer.is_by_batch for layer in self.layers)

    def spec(self, samples: int, *, halved: bool = False) -> ModelSpec:
        """The model specification for a batch of ``samples``; ``halved`` halves activations for mixed precision."""
        parameters = tuple(
            ParameterSpec(name=f"{layer.name}.{name}", shape=shape, dtype=self.dtype, module=layer.name)
            for layer in self.layers
            for name, shape in layer.parameters.items()
        )
        return ModelSpec(
            parameters=parameters,
            forward_order=tuple(layer.name for layer in self.layers),
            ready_order=tuple(p.name for p in reversed(parameters)),
            activation_bytes=round(self.activation_bytes * samples / self.samples / (2 if halved else 1)),
        )

    def times(self, device: Device, samples: int, *, halved: bool = False) -> tuple[LayerTimes, ...]:
        """Each layer's times for a batch of ``samples``: from the table, or computed from its work on ``device``.

        ``halved`` computes in mixed precision.
        """
        return tuple(self._times(layer, device, samples, halved=halved) for layer in self.layers)

    def _times(self, layer: LayerRow, device: Device, samples: int, *, halved: bool) -> LayerTimes:
        more = samples / self.samples
        work = Work(kept_bytes=layer.kept_bytes * more)
        cut_bytes = layer.cut_bytes * more
        if layer.forward_ms is None:
            work += self._work(layer, samples)
            if halved:
                work, cut_bytes = work.halved(FLOAT_BYTES * layer.numel), cut_bytes / 2
            forward_ms = device.forward_s(work) * 1e3
        else:
            forward_ms = self._at(layer.forward_ms, samples)
        backward_ms = (
            forward_ms * device.backward_factor
            if layer.backward_ms is None
            else self._at(layer.backward_ms, samples)
        )
        return LayerTimes(
            layer.name,
            (*(f"{layer.name}.{name}" for name in layer.parameters), *layer.tied),
            round(forward_ms * 1e6),
            round(backward_ms * 1e6),
            kept_bytes=round(work.kept_bytes),
            cut_bytes=round(cut_bytes),
        )

    def _work(self, layer: LayerRow, samples: int) -> Work:
        """The layer's work; reading parameters and launching kernels do not depend on the batch."""
        assert layer.flops is not None
        moved = layer.moved_bytes
        if not isinstance(moved, dict):
            fixed = min(moved, layer.numel * DTYPE_BYTES[self.dtype])
            moved = {self.samples: moved, 2 * self.samples: 2 * moved - fixed}
        return Work(self._at(layer.flops, samples), at_batch(moved, samples), layer.kernels)

    def _at(self, value: float | dict[int, float], samples: int) -> float:
        return at_batch(value, samples) if isinstance(value, dict) else value * samples / self.samples


def load_table(path: Path) -> TableFile:
    """Read a layer table. Raises UserError if the file is missing or invalid."""
    return files.parse_yaml(
        files.read_text(path, UserError, "layer table"), TableFile, UserError, f"layer table {path}"
    )
