"""ModelSpec: the facts about a model that communication decisions need, without the model itself."""

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
    """The memory of a rank around one call of ``module`` in forward, in bytes, counted as in ``PassMemory``.

    ``begin_bytes`` are held when the call begins, at most ``peak_bytes`` during it, and ``end_bytes`` when it ends;
    ``output_bytes`` of these are new memory of its output.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    module: str
    begin_bytes: int = Field(ge=0)
    peak_bytes: int = Field(ge=0)
    end_bytes: int = Field(ge=0)
    output_bytes: int = Field(ge=0)

    @property
    def kept_bytes(self) -> int:
        """The memory kept for backward, without the output."""
        return max(0, self.end_bytes - self.begin_bytes - self.output_bytes)


class PassMemory(BaseModel):
    """The memory of a rank in forward and backward beyond parameters, buffers, optimizer state and gradients.

    ``forward_bytes`` is the peak during forward; ``backward`` has, for each gradient in the order of readiness, the peak
    from the previous gradient (or the end of forward) until it is complete; ``after_bytes`` is the peak from the last
    gradient until the update; ``update_bytes`` is the additional memory of updating all parameters.
    ``gradients_apart``: gradients have memory of their own, in addition to DDP's buckets; ``gradients_kept``: those of
    the previous step still exist during forward; ``gradients_accumulate``: a step has several backward passes, and all
    gradients exist in all but the first. ``modules`` are the calls of modules in forward, in the order in which they
    begin; empty if not tracked.
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
    """The memory of a stage's backward split into input and weight gradients, in bytes (see ``StageMemory``).

    Input gradients need up to ``input_bytes`` and leave ``put_off_bytes``, including themselves, until weight gradients
    are computed; these need ``first_weight_bytes`` in the first micro-batch of a step, and ``weight_bytes`` later.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    input_bytes: int = Field(ge=0)
    put_off_bytes: int = Field(ge=0)
    first_weight_bytes: int = Field(ge=0)
    weight_bytes: int = Field(ge=0)


class StageMemory(BaseModel):
    """The memory of a pipeline stage in a step, in bytes, beyond parameters, buffers and optimizer state.

    A micro-batch's forward needs up to ``forward_bytes`` more, including its loss, and leaves ``kept_bytes`` until its
    backward. Backward needs up to ``backward_bytes`` more; the first one of a step ``first_backward_bytes``, since it
    allocates ``gradient_bytes`` of gradients (which always exist if ``gradients_kept``). It leaves ``outputs_bytes`` for
    the end of the step, which needs ``end_bytes`` more. Received messages are not included. ``halves`` were observed, or
    derived from an unsplit backward; None if that was not possible or not needed (torch's first stage defers all of
    it). Modules with parameters output ``weighted_bytes`` in a forward. The script's batch has ``batch_bytes``, and an
    update needs ``update_bytes``. In the recorded order, the peak of the step was ``step_bytes``, with
    ``received_bytes`` for messages.
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
    """A module of a chain: its only input is the output of the previous module.

    ``name`` is the module's name. ``parameters`` are the trainable parameters used between the end of the previous module
    and its own, by the names they have there. It outputs ``output_bytes`` for the recorded batch; 0 if a pipeline cannot
    be split after it. Its innermost modules output ``kept_bytes``. ``forward_ns`` and ``backward_ns`` are median times of
    a micro-batch, if those of a stage were timed; 0 if the trace has spans of modules instead.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    parameters: tuple[str, ...] = ()
    output_bytes: int = Field(default=0, ge=0)
    kept_bytes: int = Field(default=0, ge=0)
    forward_ns: int = Field(default=0, ge=0)
    backward_ns: int = Field(default=0, ge=0)


class Chain(BaseModel):
    """The modules that a forward calls in sequence, observed in one forward of ``samples``.

    Computation before the first and after the last module counts as theirs. ``aliases`` has other names that ``links``
    use for a parameter of the model. ``batch_norms`` says that some modules compute batch statistics. Without
    ``links``, ``why_not`` says why.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    links: tuple[ChainLink, ...] = Field(default=(), max_length=4096)
    samples: int = Field(default=0, ge=0)
    aliases: dict[str, str] = {}
    batch_norms: bool = False
    why_not: str = ""


class ModelSpec(BaseModel):
    """A model's trainable parameters, in registration order, and what a recording learned about their use.

    ``class_name`` is the name of the module's class, if recorded.
    ``forward_order`` names modules in the order in which a forward first needs their parameters;
    ``ready_order`` names parameters in the order in which a backward finishes their gradients.
    Both are empty if nothing was recorded. ``activation_bytes`` is roughly what forward keeps for backward;
    ``pass_memory`` has more detail, if it was tracked, and so does ``stage_memory`` for a pipeline stage. Parameters
    that are not trained are not listed; they take ``frozen_bytes``.
    ``find_unused_parameters`` is DDP's option: a backward may leave parameters without a gradient, and ranks exchange
    which.
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
        """The bytes that ranks exchange about which parameters a backward used: 4 per parameter."""
        return 4 * len(self.parameters)

    @property
    def fingerprint(self) -> str:
        """A digest of names, shapes and dtypes: equal for two processes that train the same model."""
        digest = hashlib.sha256()
        for parameter in self.parameters:
            digest.update(f"{parameter.name}|{parameter.shape}|{parameter.dtype}\n".encode())
        return digest.hexdigest()[:16]

    def ready_parameters(self) -> tuple[ParameterSpec, ...]:
        """Parameters in the order in which gradients become ready; reverse registration order where unknown."""
        recorded = [self.by_name[name] for name in self.ready_order if name in self.by_name]
        seen = {parameter.name for parameter in recorded}
        return (*recorded, *(p for p in reversed(self.parameters) if p.name not in seen))

    def forward_parameters(self) -> tuple[ParameterSpec, ...]:
        """Parameters in the order in which forward needs them; registration order where unknown."""
        rank = {module: index for index, module in enumerate(self.forward_order)}
        return tuple(sorted(self.parameters, key=lambda p: rank.get(p.module, len(rank))))
