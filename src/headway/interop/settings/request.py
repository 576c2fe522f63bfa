"""What settings are asked for: a plan, and what is known of the job that it was made for."""

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
    """What is asked of settings of collectives.

    ``channels`` is how many of them a rule names, ``appended`` are rules to be kept behind the plan's own, and
    ``as_replayed`` fixes what the plan leaves to the library to what a replay lays out.
    """

    channels: int | None = None
    appended: tuple[TunerRule, ...] = ()
    as_replayed: bool = False


@dataclass(frozen=True)
class SettingsRequest:
    """A plan, and the models of its job's stages: none where its trace is not known, for a reason if there is one.

    A plan file alone says what was decided. What becomes of it for a model (how many elements a bucket holds, which
    modules are in it) takes the model.
    """

    plan: Plan
    stages: tuple[ModelSpec, ...] = ()
    collectives: CollectiveOptions = CollectiveOptions()
    why_no_trace: str = "a plan alone"

    @property
    def data(self) -> Strategy | None:
        """The strategy along the dimension of data; where it changes while the job trains, what it begins with."""
        found = self.plan.parallel.get(DATA)
        if isinstance(found, DecoupledStrategy) and found.begin_as is not None:
            return found.begin_as
        return found

    @property
    def pipeline(self) -> PipelineStrategy | None:
        """The strategy along the dimension of stages."""
        found = self.plan.parallel.get(PIPELINE)
        return found if isinstance(found, PipelineStrategy) else None

    @property
    def pipeline_ranks(self) -> int:
        """The number of ranks that share a model."""
        return self.plan.mesh.get(PIPELINE, 1)

    @property
    def replicas(self) -> int:
        """The number of ranks that train the same stage, or all of the model."""
        return self.plan.mesh.get(DATA, 1)

    def schedules(self, why: str) -> tuple[BucketSchedule, ...]:
        """What the strategy along data decides for each stage.

        Raises PlanError where there is no trace, saying ``why`` it is needed, and where the plan is for another model.
        """
        assert isinstance(self.data, Bucketed)
        return tuple(self.data.decide(Job.of(stage, self.replicas)) for stage in self.models(why))

    def models(self, why: str) -> tuple[ModelSpec, ...]:
        """The models of the stages. Raises PlanError where there is no trace, saying ``why`` it is needed."""
        if not self.stages:
            raise PlanError(
                f"these settings need the model: {why}", got=self.why_no_trace,
                expected="the trace that the plan was made from", fix="Add --trace TRACE.",
            )  # fmt: skip
        return self.stages

    def refuse(self, tool: str, expected: str, fix: str = "") -> NoReturn:
        """Raise PlanError: ``tool`` has nothing that comes near this plan."""
        raise PlanError(
            f"{tool} has no settings for this plan",
            got="; ".join(strategy.describe() for strategy in self.plan.parallel.values()),
            expected=expected,
            fix=fix or "Run the plan itself with headway run --plan.",
        )


def bucketed(asked: SettingsRequest, tool: str, kinds: tuple[type[Strategy], ...]) -> Bucketed | None:
    """The strategy along data, one of ``kinds``; None for a pipeline alone. Raises PlanError for others."""
    if asked.data is None and asked.pipeline is not None:
        return None
    if not isinstance(asked.data, kinds):
        names = " or ".join(kind.name for kind in kinds)
        asked.refuse(tool, f"{names} along {DATA}")
    assert isinstance(asked.data, Bucketed)
    return asked.data


def one_wire(strategy: DistributedDataParallelStrategy) -> Cast | None:
    """What type every bucket is cast to, where all are to the same; None where they are not, or otherwise sent."""
    kinds = set(strategy.wire)
    only = next(iter(kinds)) if len(kinds) == 1 else None
    return only if isinstance(only, Cast) and not only.error_feedback else None


def unexpressed(asked: SettingsRequest, of_passes: Sequence[str] | None = None) -> list[str]:
    """What no stock tool does of a plan. ``of_passes`` is what a tool does not do of passes, all of them by default."""
    said = [f"the pass {pass_.name}" for pass_ in asked.plan.passes] if of_passes is None else list(of_passes)
    planned = asked.plan.parallel.get(DATA)
    if isinstance(planned, DecoupledStrategy) and planned.decides_while_training:
        said.append("the search for better options while training: these are what it begins with")
    if isinstance(asked.data, DecoupledStrategy) and asked.data.wire is not None:
        said.append(f"gradients sent as {asked.data.wire.describe()}: they are sent as they are")
    if asked.pipeline is not None and asked.pipeline.follows_network:
        said.append("the order that follows the network: it stays at the one that it begins with")
    return said
