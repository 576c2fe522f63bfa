"""Plan: everything decided about one job's communication, as one readable YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, field_validator, model_serializer

from headway import files
from headway.cluster import Cluster
from headway.errors import PlanError
from headway.model import ModelSpec
from headway.strategies import registry
from headway.strategies.base import Strategy
from headway.version import __version__

FORMAT: Literal[1] = 1


class PlannedModel(BaseModel):
    """Which model a plan was made for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parameters: int = Field(ge=0)
    size_bytes: int = Field(ge=0)
    fingerprint: str

    @classmethod
    def of(cls, model: ModelSpec) -> PlannedModel:
        """Describe ``model``."""
        return cls(
            parameters=len(model.parameters), size_bytes=model.size_bytes, fingerprint=model.fingerprint
        )


class Prediction(BaseModel):
    """What is expected of a plan: its step, give or take ``uncertainty_ms``; the recorded one took ``baseline_ms``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step_ms: float = Field(ge=0, allow_inf_nan=False)
    baseline_ms: float = Field(ge=0, allow_inf_nan=False)
    uncertainty_ms: float = Field(ge=0, allow_inf_nan=False)


class Plan(BaseModel):
    """A strategy with its options, the job it was made for and what it is expected to give."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = FORMAT
    headway: str = __version__
    strategy: SerializeAsAny[Strategy]
    world_size: int = Field(ge=1)
    model: PlannedModel
    prediction: Prediction | None = None
    cluster: Cluster | None = None

    @field_validator("strategy", mode="before")
    @classmethod
    def _strategy_by_name(cls, value: Any) -> Any:
        if isinstance(value, Strategy):
            return value
        if not isinstance(value, dict) or len(value) != 1:
            raise ValueError(
                f"one strategy by name, one of {', '.join(registry.names())}, with its options below it"
            )
        ((name, options),) = value.items()
        if name not in registry.names():
            raise ValueError(f"unknown strategy {name!r}, expected one of {', '.join(registry.names())}")
        return registry.plugin_named(name).policy.model_validate(options or {})

    @model_serializer(mode="wrap")
    def _strategy_under_its_name(self, handler: Any) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        data["strategy"] = {self.strategy.name: data["strategy"]}
        return data

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan. Raises PlanError where it is missing, damaged, or of another format version."""
        text = files.read_text(Path(path), PlanError, "plan")
        return files.parse_yaml(text, cls, PlanError, f"plan {path}")

    def save(self, path: str | Path) -> None:
        """Write the plan as YAML, whole or not at all."""
        files.write_text(
            Path(path), files.dump_yaml(self.model_dump(mode="json", exclude_none=True)), PlanError
        )

    def check(self, model: ModelSpec, world_size: int) -> None:
        """Raise PlanError unless the plan was made for this model and this number of workers."""
        remake = "Record this job and run headway optimize on that trace."
        if world_size != self.world_size:
            raise PlanError(
                "the plan is for another world size", got=f"{world_size} workers",
                expected=f"{self.world_size}", fix=remake,
            )  # fmt: skip
        if model.fingerprint != self.model.fingerprint:
            raise PlanError(
                "the plan is for another model",
                got=f"{len(model.parameters)} parameters in {model.size_bytes} bytes ({model.fingerprint})",
                expected=f"{self.model.parameters} in {self.model.size_bytes} ({self.model.fingerprint})",
                fix=remake,
            )
