"""What generators can be told: validated, and the same in plan files, live and in replay."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Milliseconds = Annotated[float, Field(ge=0.001, le=3_600_000, allow_inf_nan=False)]


class GeneratorOptions(BaseModel):
    """The options of a generator that has none; the others' are derived from it."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class MixingOptions(GeneratorOptions):
    """Options of generators that see to it that all workers mix."""

    mixing_window: int = Field(default=4, ge=1, le=1000)
    """How many of its last groups have to connect each worker with all others, directly or by way of others."""


class PairOptions(MixingOptions):
    """Options of pairs."""

    neighbours: Literal["bipartite", "any"] = "bipartite"
    """Whom a worker averages with: bipartite draws one of the other half (even and odd numbers), any draws anyone."""


class SizeOptions(MixingOptions):
    """Options of random groups."""

    group_size: int = Field(default=4, ge=2, le=1024)
    """How many workers average together."""


class DrawingOptions(SizeOptions):
    """Options of groups that are drawn before all of their members have come."""

    slowdown_threshold: int = Field(default=0, ge=0, le=1_000_000)
    """Who has asked so many times less than the worker for which groups are drawn is left out; 0: nobody is."""

    lateness_threshold: float = Field(default=0.0, ge=0, le=1000, allow_inf_nan=False)
    """Who asks, after the end of its group, later than that worker does by so many of the shortest iterations is left
    out; 0: nobody is."""


class FirstComeOptions(SizeOptions):
    """Options of first-come groups."""

    deadline_ms: Milliseconds | None = None
    """How long who has come waits for more; by default it follows the times between arrivals."""

    patience: float = Field(default=2.0, ge=0.1, le=100, allow_inf_nan=False)
    """How many times as long as a group takes to fill in the mean the deadline is, where it follows."""

    least_ms: Milliseconds = 1.0
    """The shortest deadline, where it follows."""

    most_ms: Milliseconds = 1000.0
    """The longest deadline, where it follows; also the one before anything is known."""

    @model_validator(mode="after")
    def _in_order(self) -> FirstComeOptions:
        if self.least_ms > self.most_ms:
            raise ValueError("least_ms is longer than most_ms")
        return self
