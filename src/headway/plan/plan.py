"""Plan: everything decided about one job, as one readable YAML file."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    StringConstraints,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails

from headway import files
from headway.cluster import Cluster
from headway.errors import PlanError
from headway.model import ModelSpec
from headway.passes.base import Pass
from headway.passes.registry import GROUP, passes
from headway.plugins import unknown
from headway.scheduling.mesh import Groups, groups_along
from headway.strategies import registry
from headway.strategies.base import DATA, PIPELINE, Strategy, short_name
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.version import __version__

FORMAT: Literal[2] = 2
MAX_WORLD_SIZE = 2**20
_FROZEN = ConfigDict(frozen=True, extra="forbid")

Dimension = Annotated[str, StringConstraints(pattern="^[a-z][a-z_]*$", max_length=32)]


class PlannedModel(BaseModel):
    """The model that a plan was made for."""

    model_config = _FROZEN

    parameters: int = Field(ge=0)
    """The number of its trainable parameters."""

    size_bytes: int = Field(ge=0)
    """Their size in total."""

    fingerprint: str
    """A digest of their names, shapes and dtypes."""

    @classmethod
    def of(cls, model: ModelSpec) -> PlannedModel:
        """Describe ``model``."""
        return cls(
            parameters=len(model.parameters), size_bytes=model.size_bytes, fingerprint=model.fingerprint
        )


class Prediction(BaseModel):
    """The prediction for a plan."""

    model_config = _FROZEN

    step_ms: float = Field(ge=0, allow_inf_nan=False)
    """The expected step under the plan."""

    baseline_ms: float = Field(ge=0, allow_inf_nan=False)
    """The recorded step, the baseline of the gain."""

    uncertainty_ms: float = Field(ge=0, allow_inf_nan=False)
    """By how much ``step_ms`` may be off, in nine of ten cases."""

    peak_bytes: int | None = Field(default=None, ge=0)
    """The predicted peak memory of one rank."""

    recorded: str | None = None
    """A digest of the plan if it is the recorded one; an edited plan has another digest."""


class Plan(BaseModel):
    """A strategy for each dimension of the job's device mesh, passes, and the job that they are for."""

    model_config = _FROZEN

    format: Literal[2] = FORMAT
    """The version of this format."""

    headway: str = __version__
    """The version of Headway that wrote the plan."""

    mesh: dict[Dimension, Annotated[int, Field(ge=1, le=MAX_WORLD_SIZE)]] = Field(min_length=1)
    """The number of ranks along each dimension, the outermost first, as in ``torch.distributed.DeviceMesh``. Their
    product is the number of workers; consecutive ranks are neighbours along the last dimension."""

    parallel: dict[Dimension, SerializeAsAny[Strategy]]
    """For each dimension of the mesh, the name of a strategy with its options below it."""

    passes: tuple[SerializeAsAny[Pass], ...] = ()
    """Changes to the job beyond its strategies, by name with their options, in the order in which they are applied."""

    model: PlannedModel
    """The model that the plan is for; others are refused. For a pipeline, the model of the first stage."""

    stages: tuple[PlannedModel, ...] | None = None
    """For a pipeline, the model of each stage."""

    changes_training: str | None = None
    """How the plan changes what is trained, in words, as permitted by its user; null if it does not."""

    prediction: Prediction | None = None
    """The prediction, if the plan was replayed."""

    cluster: Cluster | None = None
    """The hosts and links that the prediction is for."""

    trace: str | None = None
    """The folder of the recording that the plan was made from; relative to the plan file's folder if it is below that."""

    @classmethod
    def data_parallel(
        cls,
        strategy: Strategy,
        world_size: int,
        model: ModelSpec,
        *,
        prediction: Prediction | None = None,
        cluster: Cluster | None = None,
    ) -> Self:
        """The plan by which ``world_size`` ranks each train all of ``model`` with ``strategy``."""
        return cls(
            mesh={DATA: world_size},
            parallel={DATA: strategy},
            model=PlannedModel.of(model),
            changes_training=strategy.changes_training or None,
            prediction=prediction,
            cluster=cluster,
        )

    @classmethod
    def pipeline(
        cls,
        strategy: Strategy,
        stages: Sequence[ModelSpec],
        *,
        ranks: int | None = None,
        prediction: Prediction | None = None,
        cluster: Cluster | None = None,
    ) -> Self:
        """The plan by which ``ranks`` (by default one per stage) train ``stages`` with ``strategy``."""
        return cls(
            mesh={PIPELINE: ranks or len(stages)},
            parallel={PIPELINE: strategy},
            model=PlannedModel.of(stages[0]),
            stages=tuple(map(PlannedModel.of, stages)),
            prediction=prediction,
            cluster=cluster,
        )

    @classmethod
    def on_mesh(
        cls,
        strategy: MeshStrategy,
        mesh: Mapping[str, int],
        stages: Sequence[ModelSpec],
        *,
        prediction: Prediction | None = None,
        cluster: Cluster | None = None,
    ) -> Self:
        """The plan by which replicated pipelines train ``stages`` with ``strategy``."""
        return cls(
            mesh=dict(mesh),
            parallel={PIPELINE: strategy.pipeline, DATA: strategy.data},
            model=PlannedModel.of(stages[0]),
            stages=tuple(map(PlannedModel.of, stages)),
            prediction=prediction,
            cluster=cluster,
        )

    @field_validator("parallel", mode="before")
    @classmethod
    def _strategies_by_name(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError("expected a strategy for each dimension of the mesh")
        return {dimension: _strategy(option, dimension) for dimension, option in value.items()}

    @field_validator("passes", mode="before")
    @classmethod
    def _passes_by_name(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        return [_pass(option, position) for position, option in enumerate(value)]

    @field_validator("passes")
    @classmethod
    def _in_order(cls, passes: tuple[Pass, ...]) -> tuple[Pass, ...]:
        for pass_ in passes[1:]:
            if pass_.stands_first:
                raise ValueError(f"{pass_.name} must be the first pass, and listed once")
        return passes

    @model_validator(mode="after")
    def _fits_the_mesh(self) -> Self:
        if self.mesh.keys() != self.parallel.keys():
            raise ValueError(
                f"parallel needs a strategy for each of {', '.join(self.mesh)}, got one for {', '.join(self.parallel)}"
            )
        for dimension, strategy in self.parallel.items():
            if strategy.dimension != dimension:
                raise ValueError(
                    f"{strategy.name} is for the dimension {strategy.dimension!r}, got {dimension!r}"
                )
        if self.world_size > MAX_WORLD_SIZE:
            raise ValueError(f"a mesh of {self.world_size} ranks, expected at most {MAX_WORLD_SIZE}")
        if self.passes and PIPELINE in self.parallel:  # passes would be neither predicted nor applied
            raise ValueError(
                f"a pipeline takes no passes, got {', '.join(pass_.name for pass_ in self.passes)}"
            )
        for pass_ in self.passes:
            for strategy in self.parallel.values():
                if pass_.leaves_out_steps and strategy.counts_steps:
                    raise ValueError(
                        f"under {pass_.describe()} a rank may skip a step, which {strategy.name} does not support"
                    )
        return self

    @field_serializer("parallel", mode="wrap")
    def _strategies_under_their_names(self, value: dict[str, Strategy], handler: Any) -> dict[str, Any]:
        options: dict[str, Any] = handler(value)
        return {dimension: {value[dimension].name: option} for dimension, option in options.items()}

    @field_serializer("passes", mode="wrap")
    def _passes_under_their_names(self, value: tuple[Pass, ...], handler: Any) -> list[dict[str, Any]]:
        return [{pass_.name: options} for pass_, options in zip(value, handler(value), strict=True)]

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return math.prod(self.mesh.values())

    @property
    def digest(self) -> str:
        """A digest of all decisions of the plan."""
        decided = self.model_dump_json(include={"mesh", "parallel", "passes"})
        return hashlib.sha256(decided.encode()).hexdigest()[:16]

    @property
    def is_recorded(self) -> bool:
        """Whether the plan is the recorded one."""
        return self.prediction is not None and self.prediction.recorded == self.digest

    def describe(self) -> str:
        """The strategy and the passes in a few words."""
        return " + ".join([self.strategy.describe(), *(pass_.describe() for pass_ in self.passes)])

    def short_name(self) -> str:
        """The short name of the strategy, and the names of the passes."""
        return " + ".join([short_name(self.strategy.describe()), *(pass_.name for pass_ in self.passes)])

    @property
    def strategy(self) -> Strategy:
        """The strategy of a one-dimensional plan, or of replicated pipelines. Raises PlanError for other plans."""
        if len(self.parallel) == 1:
            (strategy,) = self.parallel.values()
            return strategy
        pipeline, data = self.parallel.get(PIPELINE), self.parallel.get(DATA)
        if len(self.parallel) > 2 or not (
            isinstance(pipeline, PipelineStrategy)
            and data is not None
            and isinstance(data.begins_as, DistributedDataParallelStrategy | DecoupledStrategy)
        ):
            raise PlanError(
                "this combination of strategies is not supported",
                got=", ".join(
                    f"{strategy.name} along {dimension}" for dimension, strategy in self.parallel.items()
                ),
                expected="one dimension, or a pipeline whose stages are trained with ddp or decoupled",
                fix="Leave one dimension in mesh and parallel, or use one of these along data.",
            )
        return MeshStrategy.model_validate({"pipeline": pipeline, "data": data})

    def groups(self, dimension: str) -> Groups:
        """The groups of ranks that the strategy of ``dimension`` acts on."""
        return groups_along(self.mesh, dimension)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan. Raises PlanError if it is missing, damaged, or of an unknown format."""
        what = f"plan {path}"
        data = files.plain_yaml(files.read_text(Path(path), PlanError, "plan"), PlanError, what)
        if isinstance(data, dict) and data.get("format") == 1:
            data = upgraded(data, what)
        plan = files.validate(data, cls, PlanError, what)
        if plan.trace is None:
            return plan
        return plan.model_copy(update={"trace": os.path.join(Path(path).absolute().parent, plan.trace)})

    def save(self, path: str | Path) -> None:
        """Write the plan as YAML: the complete file or none."""
        document = self.model_dump(mode="json", exclude_none=True)
        folder = Path(path).absolute().parent
        if self.trace is not None and Path(self.trace).is_relative_to(folder):
            document["trace"] = str(Path(self.trace).relative_to(folder))
        files.write_text(Path(path), files.dump_yaml(document), PlanError)

    def check(self, model: ModelSpec, world_size: int) -> None:
        """Raise PlanError unless the plan was made for this model and this number of workers."""
        self._check(model, self.model, "model", world_size)

    def check_recorded(self, model: ModelSpec, stages: Sequence[ModelSpec], world_size: int) -> None:
        """Raise PlanError unless the plan was made for a job that trains ``model``, or ``stages`` if it has any."""
        if not stages:
            self.check(model, world_size)
        for number, stage in enumerate(stages):
            self.check_stage(stage, number, len(stages), world_size)

    def check_stage(self, model: ModelSpec, stage: int, stages: int, world_size: int) -> None:
        """Raise PlanError unless the plan has ``stages`` stages, and stage number ``stage`` is ``model``."""
        planned = self.stages or ()
        if stages != len(planned):
            raise PlanError(
                "the plan is for another number of stages", got=f"{stages}", expected=f"{len(planned)}",
                fix="Record this job and run headway optimize on that trace.",
            )  # fmt: skip
        self._check(model, planned[stage], f"stage {stage}", world_size)

    def _check(self, model: ModelSpec, planned: PlannedModel, what: str, world_size: int) -> None:
        remake = "Record this job and run headway optimize on that trace."
        if world_size != self.world_size:
            raise PlanError(
                "the plan is for another world size", got=f"{world_size} workers",
                expected=f"{self.world_size}", fix=remake,
            )  # fmt: skip
        if model.fingerprint != planned.fingerprint:
            raise PlanError(
                f"the plan is for another {what}",
                got=f"{len(model.parameters)} parameters in {model.size_bytes} bytes ({model.fingerprint})",
                expected=f"{planned.parameters} in {planned.size_bytes} ({planned.fingerprint})",
                fix=remake,
            )


def _strategy(value: Any, dimension: Any) -> Strategy:
    if isinstance(value, Strategy):
        return value
    name, options = _named(value, "strategy", registry.GROUP, registry.names())
    name, options = registry.of_today(name, options)
    with _located(dimension, name):
        return registry.policy_named(name).model_validate(options)


def _pass(value: Any, position: int) -> Pass:
    if isinstance(value, Pass):
        return value
    name, options = _named(value, "pass", GROUP, tuple(passes()))
    with _located(position, name):
        return passes()[name].model_validate(options)


@contextmanager
def _located(*where: int | str) -> Iterator[None]:
    """Make validation errors in the block name their place in the plan file."""
    try:
        yield
    except ValidationError as failure:
        complaints = [
            InitErrorDetails(
                type=error["type"],
                loc=(*where, *error["loc"]),
                input=error["input"],
                ctx=error.get("ctx", {}),
            )
            for error in failure.errors(include_url=False)
        ]
        try:
            placed = ValidationError.from_exception_data(failure.title, complaints)
        except KeyError:  # a custom error of a plug-in
            raise failure from None
        raise placed from None


def _named(value: Any, what: str, group: str, names: tuple[str, ...]) -> tuple[str, Any]:
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError(
            f"expected the name of one {what} with its options below it, one of {', '.join(names)}"
        )
    ((name, options),) = value.items()
    if name not in names:
        raise ValueError(unknown(what, group, name, names))
    return name, options or {}


class _Plan1(BaseModel):
    """The fields of format 1 that differ from the current format."""

    model_config = ConfigDict(extra="allow")

    format: Literal[1]
    strategy: dict[str, Any]
    world_size: int = Field(ge=1, le=MAX_WORLD_SIZE)


def upgraded(data: dict[str, Any], what: str) -> dict[str, Any]:
    """Convert ``data`` of format 1 to the current format. Raises PlanError if it is damaged."""
    old = files.validate(data, _Plan1, PlanError, what)
    rest = {key: value for key, value in data.items() if key not in _Plan1.model_fields}
    return {"format": FORMAT, "mesh": {DATA: old.world_size}, "parallel": {DATA: old.strategy}, **rest}
