"""What ranks raise for the tests of ordinary modules that cannot be pipelines, or not on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.behaviour.pipelined_models import layers, sgd
from tests.behaviour.pipelined_step import MICRO_BATCHES, WIDTH, Step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import headway
from headway.errors import UserError
from headway.plan import Plan
from headway.strategies.live.module_spec import model_spec
from headway.strategies.pipeline.mesh import MeshStrategy


def refused(rank: int, world_size: int) -> dict[str, str]:
    """What is raised where a module cannot become a pipeline."""
    del world_size

    def called(**given: Any) -> str:
        model = given.pop("model", None) or layers()
        loss_fn = given.pop("loss_fn", nn.functional.mse_loss)
        optimizer = given.pop("optimizer", sgd)(model)
        named = {"micro_batches": MICRO_BATCHES, **given.pop("strategy", {})}
        try:
            headway.parallelize(
                model, optimizer, headway.strategy("pipeline", **named), loss_fn=loss_fn, **given
            )
        except UserError as error:
            return str(error)
        return "nothing was raised"

    def trains(act: Callable[[Step], Any]) -> str:
        step = Step(layers(), sgd, {})
        data, target = next(step.batches())
        try:
            step.train(data, target)
            act(step)
        except UserError as error:
            return str(error)
        return "nothing was raised"

    pair = (torch.zeros(2), torch.zeros(2))

    def clip(*given: Any) -> None:
        nn.utils.clip_grad_norm_(*given)

    return {
        "two targets": trains(lambda step: step.pipelined.train_step(pair[0], pair)),
        "a part is clipped": trains(lambda step: clip(next(step.pipelined.parameters()), 1.0)),
        "another norm": trains(lambda step: clip(step.pipelined.parameters(), 1.0, float("inf"))),
        "no Sequential": called(model=nn.Linear(2, 2)),
        "no loss": called(loss_fn=None),
        "options of DDP": called(bucket_cap_mb=1),
        "few layers": called(model=layers(2)),
        "other models": called(model=layers(6 if rank else 8)),
        "strange points": called(strategy={"split_points": ("1", "head")}),
        "points in another order": called(strategy={"split_points": ("5", "1")}),
        "one point": called(strategy={"split_points": ("1",)}),
        "another optimizer": called(optimizer=lambda _: sgd(layers())),
    }


def refused_on_meshes(rank: int, world_size: int) -> dict[str, str]:
    """What is raised on meshes, with plans and by batches that do not fit; and what trains without a mesh."""
    order = headway.strategy("pipeline", micro_batches=2)
    split = headway.strategy("pipeline", micro_batches=2, split_points=("3",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    models = [model_spec(each) for each in (layers()[:3], layers()[3:])]
    composed = headway.strategy("mesh", pipeline=split, data=headway.strategy("ddp"))
    assert isinstance(composed, MeshStrategy)
    plan = Plan.on_mesh(composed, {"pipeline": 2, "data": 2}, models)

    def called(
        planned: Any, *sizes: tuple[int, int], mesh: Any = None, model: Any = None, late: Any = None
    ) -> str:
        model = model or layers()
        given = {} if mesh is None else {"mesh": mesh}
        loss_fn = None if planned.__class__.__name__ == "DecoupledStrategy" else nn.functional.mse_loss
        try:
            found: Any = headway.parallelize(model, sgd(model), planned, loss_fn=loss_fn, **given)
            for pair in sizes:
                batch = torch.ones(pair[rank // 2 if mesh is square else rank % 2], WIDTH).double()
                found.train_step(batch, batch)
                if late is not None:
                    late(found)
        except UserError as error:
            return str(error)
        return "trained"

    return {
        "other names": called(order, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "data"))),
        "no names": called(order, mesh=init_device_mesh("cpu", (2, 2))),
        "fewer ranks": called(order, mesh=square["pipeline"]),
        "no mesh": called(order, mesh={"pipeline": 2, "data": 2}),
        "nothing said": called(headway.strategy("mesh", pipeline=order, data=headway.strategy("ddp"))),
        "three stages": called(headway.strategy("mesh", pipeline=THIRDS, data=headway.strategy("ddp"))),
        "halved backwards": called(HALVED, (8, 8), mesh=square),
        "no pipeline": called(headway.strategy("decoupled"), mesh=square),
        "another plan": called(plan, mesh=square),
        "a larger plan": called(Plan.on_mesh(composed, {"pipeline": 2, "data": 4}, models)),
        "a plan for another model": called(plan, model=layers(8)),
        "other sizes": called(order, (8, 4), mesh=square),
        "other sizes later": called(order, (8, 8), (8, 4), mesh=square),
        "frozen later": called(order, (8, 8), (8, 8), mesh=square, late=_freeze_first),
        "by its split points": called(composed, (8, 8)),
        "by its plan": called(plan, (8, 8)),
    }


THIRDS = headway.strategy("pipeline", micro_batches=2, split_points=("2", "4"))
HALVED = headway.strategy("pipeline", micro_batches=2, order="zero-bubble")


def _freeze_first(model: Any) -> None:
    for each in model.stage.parameters():
        each.requires_grad_(False)
