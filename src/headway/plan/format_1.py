"""Plans of format 1: one strategy of data parallelism, for a number of workers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from headway import files
from headway.errors import PlanError
from headway.plan.plan import FORMAT, MAX_WORLD_SIZE
from headway.strategies.base import DATA


class _Plan1(BaseModel):
    """What differs from today's format."""

    model_config = ConfigDict(extra="allow")

    format: Literal[1]
    strategy: dict[str, Any]
    world_size: int = Field(ge=1, le=MAX_WORLD_SIZE)


def upgraded(data: dict[str, Any], what: str) -> dict[str, Any]:
    """``data`` in today's format. Raises PlanError that ``what`` is damaged where it is not of format 1."""
    old = files.validate(data, _Plan1, PlanError, what)
    rest = {key: value for key, value in data.items() if key not in _Plan1.model_fields}
    return {"format": FORMAT, "mesh": {DATA: old.world_size}, "parallel": {DATA: old.strategy}, **rest}
