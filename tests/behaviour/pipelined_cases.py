"""What ranks do for the tests of ordinary modules as pipelines: train in many ways, and return the model's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.behaviour import pipelined_models as models
from tests.behaviour import pipelined_training as training
from tests.behaviour.pipelined_models import adamw, by_groups, layers, momentum, sgd
from tests.behaviour.pipelined_step import MICRO_BATCHES, State, Step
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headway.integrations import pipeline_injection
from headway.integrations.followable import injection_of
from headway.plan import Plan
from headway.strategies.injection import ScheduleInjection
from headway.strategies.live.module_spec import model_spec
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.torch_private.pipelining import plan_of_stage

Way = tuple[
    Callable[[], nn.Module],
    Callable[[nn.Module], torch.optim.Optimizer],
    Callable[[Step], list[float]],
    dict[str, Any],
]

WAYS: dict[str, Way] = {
    "plain": (layers, sgd, training.plainly, {}),
    "1F1B": (layers, sgd, training.plainly, {"order": "1f1b"}),
    "2F2B": (layers, sgd, training.plainly, {"order": "kfkb", "group_size": 2}),
    "eager": (layers, sgd, training.plainly, {"order": "eager-1f1b"}),
    "GPipe": (layers, sgd, training.plainly, {"order": "gpipe"}),
    "zero-bubble": (layers, sgd, training.plainly, {"order": "zero-bubble"}),
    "named points": (layers, sgd, training.plainly, {"split_points": ("1", "5")}),
    "one micro-batch": (layers, sgd, training.plainly, {"micro_batches": 1}),
    "six micro-batches": (layers, sgd, training.plainly, {"micro_batches": 6}),
    "momentum": (layers, momentum, training.plainly, {}),
    "AdamW": (layers, adamw, training.plainly, {}),
    "groups of parameters": (layers, by_groups, training.plainly, {}),
    "tied weights": (models.tied, sgd, training.plainly, {}),
    "tied on three stages": (models.tied_thrice, adamw, training.plainly, {"split_points": ("3", "5")}),
    "tied and accumulated": (models.tied, sgd, training.accumulated, {}),
    "tied and clipped": (models.tied, sgd, training.clipped, {}),
    "frozen": (models.frozen, sgd, training.plainly, {}),
    "layer norms": (models.normed, adamw, training.plainly, {}),
    "checkpointing": (models.checkpointed, sgd, training.plainly, {}),
    "clipping": (layers, sgd, training.clipped, {}),
    "accumulation": (layers, sgd, training.accumulated, {}),
    "learning rates": (layers, momentum, training.scheduled, {}),
    "evaluations": (layers, sgd, training.evaluated, {}),
    "resumed": (layers, sgd, training.resumed, {}),
    "mixed precision": (models.single_floats, sgd, training.in_bfloat16, {}),
    "from a checkpoint": (layers, adamw, training.from_a_checkpoint, {}),
    "clipping by torch": (layers, sgd, training.clipped_by_torch, {}),
    "clipping by value": (layers, sgd, training.clipped_by_value, {}),
    "gradients set to zero": (layers, momentum, training.set_to_zero, {}),
    "frozen first stage": (models.frozen_to_begin_with, sgd, training.plainly, {"split_points": ("4", "6")}),
    "frozen middle stage": (models.frozen_in_the_middle, sgd, training.plainly, {"split_points": ("2", "4")}),
    "batch norms": (models.normed_by_batch, sgd, training.in_parts, {}),
    "buffers": (models.with_buffers, sgd, training.in_parts, {}),
    "fewer micro-batches than stages": (layers, sgd, training.plainly, {"micro_batches": 2}),
    "single floats": (models.single_floats, adamw, training.plainly, {}),
    "in place": (models.working_in_place, sgd, training.plainly, {"split_points": ("1", "5")}),
    "in place, zero-bubble": (
        models.working_in_place, momentum, training.plainly, {"split_points": ("3", "5"), "order": "zero-bubble"},
    ),
}  # fmt: skip


SIDE_BY_SIDE = [name for name, given in WAYS.items() if given[3].get("order") != "zero-bubble"]


def trained(
    name: str,
    options: dict[str, Any] | None,
    mesh: DeviceMesh | None = None,
    pipelines: int = 1,
    ways: dict[str, Way] = WAYS,
    kind: type[Step] = Step,
) -> dict[str, Any]:
    """Losses, and the state at the end."""
    make, make_optimizer, way, given = ways[name]
    more: dict[str, Any] = {} if pipelines == 1 else {"mesh": mesh, "pipelines": pipelines}
    step = kind(make(), make_optimizer, None if options is None else {**given, **options}, **more)
    return {"said": way(step), "state": step.state()}


def in_every_way(rank: int, world_size: int) -> dict[str, Any]:
    """What comes of all ways, as a pipeline."""
    del rank, world_size
    return {name: trained(name, {}) for name in WAYS}


def side_by_side(
    rank: int, world_size: int, sizes: dict[str, int], data: dict[str, Any], names: list[str]
) -> dict[str, Any]:
    """What comes of ways ``names``, in pipelines side by side whose replicas do as ``data`` says."""
    del rank, world_size
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return {name: trained(name, {"data": data} if data else {}, mesh, sizes["data"]) for name in names}


def evaluated_under_a_plan(rank: int, world_size: int) -> dict[str, Any]:
    """Evaluations, also of another size, around steps under a plan as ``headway run`` has it in force.

    ``applied`` counts the schedules that follow it, ``order`` is that of the steps.
    """
    del world_size
    model = layers()
    strategy = PipelineStrategy(
        order="kfkb", group_size=2, micro_batches=MICRO_BATCHES, split_points=("2", "4")
    )
    plan = Plan.pipeline(strategy, [model_spec(each) for each in (model[:2], model[2:4], model[4:])])
    injection, applied = injection_of(plan), list[bool]()
    assert isinstance(injection, ScheduleInjection)
    pipeline_injection.install(plan, injection, on_applied=lambda: applied.append(True))
    try:
        step = Step(model, sgd, {"order": "gpipe", "split_points": ("2", "4")})
        said = training.evaluated_around(step)
    finally:
        pipeline_injection.uninstall()
    planned = plan_of_stage(step.pipelined.steps.stages[rank])
    assert isinstance(planned, PipelineStrategy)
    return {"said": said, "state": step.state(), "applied": len(applied), "order": planned.order}


def with_dropout(rank: int, world_size: int) -> dict[str, State]:
    """The state after training with dropout, in two orders, one of them twice; every rank has a seed of its own."""
    del world_size
    found = {}
    for name, order in (("1F1B", "1f1b"), ("again", "1f1b"), ("GPipe", "gpipe")):
        model = nn.Sequential(*(nn.Sequential(each, nn.Dropout(0.5)) for each in layers()))
        torch.manual_seed(100 + rank)
        step = Step(model, sgd, {"order": order})
        training.plainly(step)
        found[name] = step.state()
    return found
