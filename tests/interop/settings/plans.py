"""What tests ask settings for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.models import layered_model

from headway.api import strategy
from headway.interop.settings.request import CollectiveOptions, SettingsRequest
from headway.model import ModelSpec
from headway.passes.base import Pass
from headway.plan import Plan
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.pipeline.policy import PipelineStrategy

MODEL = layered_model()  # four layers of 1000 and 10 elements
BY_NAME = [["layer3.bias", "layer3.weight", "layer2.bias"], ["layer2.weight", "layer1.bias", "layer1.weight"],
           ["layer0.bias", "layer0.weight"]]  # fmt: skip


def asked(
    name: str,
    *,
    model: ModelSpec = MODEL,
    traced: bool = True,
    ranks: int = 4,
    collectives: CollectiveOptions | None = None,
    **options: Any,
) -> SettingsRequest:
    """A plan of data parallelism, and its model where it is ``traced``."""
    plan = Plan.data_parallel(strategy(name, **options), ranks, model)
    return SettingsRequest(plan, (model,) if traced else (), collectives or CollectiveOptions())


def with_passes(*passes: Pass, name: str = "ddp", **given: Any) -> SettingsRequest:
    """A plan of data parallelism with passes."""
    made = asked(name, **given)
    return replace(made, plan=made.plan.model_copy(update={"passes": passes}))


def piped(stages: int = 2, ranks: int = 2, *, traced: bool = False, **options: Any) -> SettingsRequest:
    """A plan of a pipeline alone."""
    models = [MODEL] * stages
    plan = Plan.pipeline(PipelineStrategy(**{"micro_batches": 8, **options}), models, ranks=ranks)
    return SettingsRequest(plan, tuple(models) if traced else ())


def meshed(
    data: DistributedDataParallelStrategy | DecoupledStrategy, stages: Sequence[ModelSpec] = (MODEL, MODEL)
) -> SettingsRequest:
    """A plan of three pipelines side by side, in 1F1B."""
    strategy = MeshStrategy(pipeline=PipelineStrategy(micro_batches=8), data=data)
    return SettingsRequest(
        Plan.on_mesh(strategy, {"pipeline": len(stages), "data": 3}, stages), tuple(stages)
    )


def of_tables(rules: str) -> list[list[str]]:
    """The fields of the rules of a table, without its comments."""
    return [line.split(",") for line in rules.splitlines() if not line.startswith("#")]
