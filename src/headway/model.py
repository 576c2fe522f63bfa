"""ModelSpec: what communication decisions need to know of a model, without the model itself."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from functools import cached_property
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
MAX_NUMEL = 2**48


class ParameterSpec(BaseModel):
    """One trainable parameter. ``name`` is relative to the wrapped module; ``module`` owns it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    shape: tuple[Annotated[int, Field(ge=0, le=MAX_NUMEL)], ...] = Field(max_length=64)
    dtype: str
    module: str

    @field_validator("dtype")
    @classmethod
    def _size_is_known(cls, dtype: str) -> str:
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"expected one of {', '.join(DTYPE_BYTES)}")
        return dtype

    @model_validator(mode="after")
    def _size_is_bounded(self) -> ParameterSpec:
        if self.numel > MAX_NUMEL:
            raise ValueError(f"a parameter has at most {MAX_NUMEL} elements")
        return self

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """The size of the parameter, and of its gradient."""
        return self.numel * DTYPE_BYTES[self.dtype]


class ModuleMemory(BaseModel):
    """What a rank holds around one call of ``module`` in forward, in bytes, counted as in ``PassMemory``.

    There are ``begin_bytes`` as the call begins, up to ``peak_bytes`` during it, and ``end_bytes`` as it ends, of
    which it puts out ``output_bytes`` that were not there before.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    module: str
    begin_bytes: int = Field(ge=0)
    peak_bytes: int = Field(ge=0)
    end_bytes: int = Field(ge=0)
    output_bytes: int = Field(ge=0)

    @property
    def kept_bytes(self) -> int:
        """What is kept of the call for backward, without what it puts out."""
        return max(0, self.end_bytes - self.begin_bytes - self.output_bytes)


class PassMemory(BaseModel):
    """What a rank holds during forward and backward in addition to parameters, buffers, optimizer state and gradients.

    ``forward_bytes`` is the most during forward; ``backward`` has, for each gradient in the order of readiness, the
    most from the previous gradient (or the end of forward) until it is complete; ``after_bytes`` is the most from the
    last gradient until the update; ``update_bytes`` is what the update of all parameters needs in addition.
    ``gradients_apart`` says that gradients have memory of their own, in addition to DDP's buckets, ``gradients_kept``
    that those of the previous step still exist during forward, ``gradients_accumulate`` that a step has several
    passes, in all but the first of which all gradients exist. ``modules`` are the calls of modules in forward, in the
    order in which they begin; none where they were not watched.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    forward_bytes: int = Field(ge=0)
    backward: tuple[tuple[str, Annotated[int, Field(ge=0)]], ...]
    after_bytes: int = Field(default=0, ge=0)
    update_bytes: int = Field(default=0, ge=0)
    gradients_apart: bool = True
    gradients_kept: bool = False
    gradients_accumulate: bool = False
    modules: tuple[ModuleMemory, ...] = Field(default=(), max_length=2**16)


class HalvedBackward(BaseModel):
    """What the halves of a stage's backward hold, in bytes: as ``StageMemory`` has it of whole ones.

    Gradients of inputs need up to ``input_bytes`` and leave ``put_off_bytes``, themselves among it, until those of
    weights are computed. That needs ``first_weight_bytes`` in the first micro-batch of a step, ``weight_bytes`` later.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    input_bytes: int = Field(ge=0)
    put_off_bytes: int = Field(ge=0)
    first_weight_bytes: int = Field(ge=0)
    weight_bytes: int = Field(ge=0)


class StageMemory(BaseModel):
    """What a stage of a pipeline holds in a step, in bytes, in addition to parameters, buffers and optimizer state.

    One micro-batch's forward needs up to ``forward_bytes`` beyond what is there already, its loss among it, and leaves
    ``kept_bytes`` until its backward. That needs up to ``backward_bytes`` more, the first one of a step
    ``first_backward_bytes`` since it makes the ``gradient_bytes`` of gradients (which are there all the time if
    ``gradients_kept``), and leaves ``outputs_bytes`` for the end of the step, which needs ``end_bytes`` more. What
    is received does not count there. ``halves`` are as they were seen, or told from a whole backward; None where
    neither was possible, or needed: torch's first stage puts all of it off. Modules with parameters put out
    ``weighted_bytes`` in a forward. The script's batch has ``batch_bytes``, and an update needs ``update_bytes``.
    The whole step held ``step_bytes`` at most, and ``received_bytes`` for messages, under the order that was watched.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    forward_bytes: int = Field(ge=0)
    kept_bytes: int = Field(ge=0)
    outputs_bytes: int = Field(ge=0)
    first_backward_bytes: int = Field(ge=0)
    backward_bytes: int = Field(ge=0)
    gradient_bytes: int = Field(ge=0)
    weighted_bytes: int = Field(default=0, ge=0)
    halves: HalvedBackward | None = None
    batch_bytes: int = Field(default=0, ge=0)
    end_bytes: int = Field(default=0, ge=0)
    update_bytes: int = Field(default=0, ge=0)
    gradients_kept: bool = False
    step_bytes: int = Field(default=0, ge=0)
    received_bytes: int = Field(default=0, ge=0)


class ChainLink(BaseModel):
    """A module of a chain: it is given what the one before it hands on, and nothing else.

    ``name`` is that of the module. ``parameters`` are the trainable parameters that are used from where the one before
    it ends until it ends, under the names that they have there. It hands on ``output_bytes`` for the batch that was
    seen; 0 where a pipeline may not be cut behind it. Its innermost modules put out ``kept_bytes``. A micro-batch took
    ``forward_ns`` and ``backward_ns`` in the median, where those of a stage were timed; 0 where spans of modules tell.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    parameters: tuple[str, ...] = ()
    output_bytes: int = Field(default=0, ge=0)
    kept_bytes: int = Field(default=0, ge=0)
    forward_ns: int = Field(default=0, ge=0)
    backward_ns: int = Field(default=0, ge=0)


class Chain(BaseModel):
    """The modules that a forward calls one after the other, as one forward of ``samples`` has shown it.

    What it computes before the first and behind the last counts to these. ``aliases`` has the other names that
    ``links`` use for a parameter of the model. ``batch_norms`` says that some compute statistics of their batch.
    Without ``links``, ``why_not`` says what is missing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    links: tuple[ChainLink, ...] = Field(default=(), max_length=4096)
    samples: int = Field(default=0, ge=0)
    aliases: dict[str, str] = {}
    batch_norms: bool = False
    why_not: str = ""


class ModelSpec(BaseModel):
    """A model's trainable parameters, in registration order, and what a recording learned about their use.

    ``class_name`` is the name of the module's class, where it was recorded.
    ``forward_order`` names modules in the order in which a forward first needs their parameters;
    ``ready_order`` names parameters in the order in which a backward finishes their gradients.
    Both are empty if nothing was recorded. ``activation_bytes`` is about what forward keeps for backward;
    ``pass_memory`` has more detail, if it was watched, and ``stage_memory`` of a stage of a pipeline. Parameters that
    are not trained are not listed; they take ``frozen_bytes``.
    ``find_unused_parameters`` says that the model is wrapped with that option of DDP: a backward may leave parameters
    without a gradient, and ranks tell each other which.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    parameters: tuple[ParameterSpec, ...]
    forward_order: tuple[str, ...] = ()
    ready_order: tuple[str, ...] = ()
    buffer_bytes: int = Field(default=0, ge=0)
    frozen_bytes: int = Field(default=0, ge=0)
    activation_bytes: int = Field(default=0, ge=0)
    pass_memory: PassMemory | None = None
    stage_memory: StageMemory | None = None
    optimizer_state_bytes: int = Field(default=0, ge=0)
    find_unused_parameters: bool = False
    chain: Chain | None = None
    class_name: str = Field(default="", max_length=500)

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [parameter.name for parameter in self.parameters]
        if len(set(names)) != len(names):
            (twice, _), *_ = Counter(names).most_common(1)
            raise ValueError(f"parameter {twice!r} is listed twice")
        return self

    @cached_property
    def by_name(self) -> dict[str, ParameterSpec]:
        """Parameters by name."""
        return {parameter.name: parameter for parameter in self.parameters}

    @property
    def size_bytes(self) -> int:
        """The bytes of all parameters, which one synchronisation of gradients moves."""
        return sum(parameter.size_bytes for parameter in self.parameters)

    @property
    def uses_bytes(self) -> int:
        """The size of what ranks tell each other about which parameters a backward used: 4 bytes per parameter."""
        return 4 * len(self.parameters)

    @property
    def fingerprint(self) -> str:
        """A digest of names, shapes and dtypes: equal for two processes that train the same model."""
        digest = hashlib.sha256()
        for parameter in self.parameters:
            digest.update(f"{parameter.name}|{parameter.shape}|{parameter.dtype}\n".encode())
        return digest.hexdigest()[:16]

    def ready_parameters(self) -> tuple[ParameterSpec, ...]:
        """Parameters in the order in which gradients become ready; reversed registration where unknown."""
        known = [self.by_name[name] for name in self.ready_order if name in self.by_name]
        seen = {parameter.name for parameter in known}
        return (*known, *(p for p in reversed(self.parameters) if p.name not in seen))

    def forward_parameters(self) -> tuple[ParameterSpec, ...]:
        """Parameters in the order in which forward needs them; registration order where unknown."""
        rank = {module: index for index, module in enumerate(self.forward_order)}
        return tuple(sorted(self.parameters, key=lambda p: rank.get(p.module, len(rank))))
