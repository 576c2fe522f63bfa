"""The request to export a plan as settings: the plan, its job's models, and options for collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from headway.compression.cast import Cast
from headway.errors import PlanError
from headway.interop.settings.tuner_table import TunerRule
from headway.job import Job
from headway.model import ModelSpec
from headway.plan import Plan
from headway.scheduling.buckets import BucketSchedule
from headway.strategies.base import DATA, PIPELINE, Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.parameter_server.policy import ParameterServerStrategy
from headway.strategies.pipeline.policy import PipelineStrategy

Bucketed = DistributedDataParallelStrategy | DecoupledStrategy | ParameterServerStrategy


@dataclass(frozen=True)
class CollectiveOptions:
    """Options for settings of collectives.

    ``channels`` is the number of channels in each rule, ``appended`` are rules to add after the plan's own, and
    ``as_replayed`` fixes what the plan leaves to the library to the algorithms that a replay uses.
    """

    channels: int | None = None
    appended: tuple[TunerRule, ...] = ()
    as_replayed: bool = False


@dataclass(frozen=True)
class SettingsRequest:
    """A plan, and the models of its job's stages: () if its trace is not available (``why_no_trace``).

    A plan file contains decisions only. Details such as a bucket's number of elements or modules need the model.
    """

    plan: Plan
    stages: tuple[ModelSpec, ...] = ()
    collectives: CollectiveOptions = CollectiveOptions()
    why_no_trace: str = "a plan alone"

    @property
    def data(self) -> Strategy | None:
        """The strategy along the data dimension; the initial one if it changes during training."""
        strategy = self.plan.parallel.get(DATA)
        return None if strategy is None else strategy.begins_as

    @property
    def pipeline(self) -> PipelineStrategy | None:
        """The strategy along the pipeline dimension."""
        strategy = self.plan.parallel.get(PIPELINE)
        return strategy if isinstance(strategy, PipelineStrategy) else None

    @property
    def pipeline_ranks(self) -> int:
        """The number of ranks that share a model."""
        return self.plan.mesh.get(PIPELINE, 1)

    @property
    def replicas(self) -> int:
        """The number of ranks that train the same stage, or the whole model."""
        return self.plan.mesh.get(DATA, 1)

    def schedules(self, why: str) -> tuple[BucketSchedule, ...]:
        """The data strategy's schedule for each stage.

        Raises PlanError if there is no trace, saying ``why`` it is needed, or if the plan is for another model.
        """
        assert isinstance(self.data, Bucketed)
        return tuple(self.data.decide(Job.of(stage, self.replicas)) for stage in self.models(why))

    def models(self, why: str) -> tuple[ModelSpec, ...]:
        """The models of the stages. Raises PlanError if there is no trace, saying ``why`` it is needed."""
        if not self.stages:
            raise PlanError(
                f"these settings need the model: {why}", got=self.why_no_trace,
                expected="the trace that the plan was made from", fix="Add --trace TRACE.",
            )  # fmt: skip
        return self.stages

    def refuse(self, tool: str, expected: str, fix: str = "") -> NoReturn:
        """Raise PlanError: ``tool`` has no equivalent of this plan."""
        raise PlanError(
            f"{tool} has no settings for this plan",
            got="; ".join(strategy.describe() for strategy in self.plan.parallel.values()),
            expected=expected,
            fix=fix or "Run the plan itself with headway run --plan.",
        )


def bucketed(request: SettingsRequest, tool: str, kinds: tuple[type[Strategy], ...]) -> Bucketed | None:
    """The data strategy if it is one of ``kinds``; None for a pipeline alone. Raises PlanError for others."""
    if request.data is None and request.pipeline is not None:
        return None
    if not isinstance(request.data, kinds):
        names = " or ".join(kind.name for kind in kinds)
        request.refuse(tool, f"{names} along {DATA}")
    assert isinstance(request.data, Bucketed)
    return request.data


def one_wire(strategy: DistributedDataParallelStrategy) -> Cast | None:
    """The cast that all buckets share; None if they differ or are sent in another form."""
    kinds = set(strategy.wire)
    only = next(iter(kinds)) if len(kinds) == 1 else None
    return only if isinstance(only, Cast) and not only.error_feedback else None


def unexpressed(request: SettingsRequest, of_passes: Sequence[str] | None = None) -> list[str]:
    """The parts of a plan that no tool supports, after the unsupported passes (``of_passes``, by default all)."""
    lacks = (
        [f"the pass {pass_.name}" for pass_ in request.plan.passes] if of_passes is None else list(of_passes)
    )
    planned = request.plan.parallel.get(DATA)
    if planned is not None and planned.begins_as is not planned:
        lacks.append("the search for better options during training: these are the initial ones")
    if isinstance(request.data, DecoupledStrategy) and request.data.wire is not None:
        lacks.append(f"gradients sent as {request.data.wire.describe()}: they are sent uncompressed")
    if request.pipeline is not None and request.pipeline.follows_network:
        lacks.append("the order that follows the network: the initial order is kept")
    return lacks
