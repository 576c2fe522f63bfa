"""Reads and writes the measured effects of passes, stored in the trace's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from headway import files
from headway.errors import TraceError
from headway.job import MeasuredEffect
from headway.model import PassMemory
from headway.trace.format import Trace

FILE = "measured.json"
_FROZEN = ConfigDict(frozen=True, extra="forbid")


class _Effect(BaseModel):
    model_config = _FROZEN

    factor: float = Field(gt=0, le=1e6, allow_inf_nan=False)
    held_bytes: int = Field(default=0, ge=0)
    memory: PassMemory | None = None


class _Effects(BaseModel):
    model_config = _FROZEN

    format: Literal[1] = 1
    fingerprint: str
    device: str
    effects: dict[str, _Effect] = Field(max_length=4096)


def measured_effects(trace: Trace) -> Mapping[str, MeasuredEffect]:
    """The measured effects for ``trace`` by name; empty without such a file.

    Raises TraceError if the file is damaged or belongs to another model.
    """
    path = trace.path / FILE
    if not path.is_file():
        return MappingProxyType({})
    what = f"{path}"
    try:
        data = json.loads(files.read_text(path, TraceError, "what was measured"))
    except ValueError as failure:
        raise TraceError(f"{what} is not JSON: {failure}", fix="Measure again.") from None
    document = files.validate(data, _Effects, TraceError, what)
    if document.fingerprint != trace.model.fingerprint:
        raise TraceError(
            f"{FILE} belongs to another model", got=document.fingerprint, expected=trace.model.fingerprint,
            fix="Measure again.",
        )  # fmt: skip
    return MappingProxyType(
        {
            name: MeasuredEffect(effect.factor, effect.held_bytes, effect.memory)
            for name, effect in document.effects.items()
        }
    )


def save_effects(trace: Trace, effects: Mapping[str, MeasuredEffect], device: str) -> Path:
    """Add ``effects``, measured on ``device``, to the file in the folder of ``trace``."""
    all_effects = {**measured_effects(trace), **effects}
    document = _Effects(
        fingerprint=trace.model.fingerprint,
        device=device,
        effects={
            name: _Effect(
                factor=all_effect.factor, held_bytes=all_effect.held_bytes, memory=all_effect.memory
            )
            for name, all_effect in all_effects.items()
        },
    )
    path = trace.path / FILE
    files.write_text(path, document.model_dump_json(indent=1) + "\n", TraceError)
    return path
