"""Ranks that compute in float16 with scaled gradients, by a plan, and a single process that does the same."""

from __future__ import annotations

from typing import Any

import torch
from tests.behaviour.pass_cases import STRATEGIES, batches, model, momentum, parameters_of

from headway.integrations.parallelize import parallelize
from headway.passes.loss_scale import _scales
from headway.passes.precision import Precision
from headway.plan import Plan
from headway.plan.plan import PlannedModel
from headway.strategies.base import Strategy
from headway.strategies.live.module_spec import model_spec


def times(rank: int, step: int) -> float:
    """By what a rank's loss is multiplied: in the third step, that of rank 1 overflows."""
    return 1e35 if (rank, step) == (1, 2) else 1.0


def alone(world_size: int) -> tuple[list[float], float]:
    """Parameters and scale after a single process has trained on the batches of all ranks, with torch's own scaler."""
    one = model(plain=True).float()
    optimizer, device = momentum(one.parameters()), next(one.parameters()).device.type
    scaler = torch.amp.GradScaler(device)
    for step, own in enumerate(
        zip(*(batches(rank, torch.float32) for rank in range(world_size)), strict=True)
    ):
        optimizer.zero_grad()
        for rank, batch in enumerate(own):
            with torch.autocast(device, dtype=torch.float16):
                out = one(batch)
            scaler.scale(out.float().square().mean() * times(rank, step) / world_size).backward()
        scaler.step(optimizer)
        scaler.update()
    return parameters_of(one), scaler.get_scale()


def trained(rank: int, world_size: int) -> dict[str, Any]:
    """Parameters and scale after some steps under each strategy, and of the single process."""
    found: dict[str, Any] = {
        "alone": alone(world_size),
        "untrained": parameters_of(model(plain=True).float()),
    }
    for name, strategy in STRATEGIES.items():
        inner = model(plain=True).float()
        optimizer = momentum(inner.parameters())
        wrapped = _planned(inner, optimizer, strategy, world_size)
        for step, batch in enumerate(batches(rank, torch.float32)):
            optimizer.zero_grad()
            (wrapped(batch).square().mean() * times(rank, step)).backward()
            optimizer.step()
        found[name] = parameters_of(inner), _scales[inner].value
    return found


def _planned(
    inner: torch.nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy, world_size: int
) -> Any:
    lower = Precision(dtype="float16")
    plan = Plan(
        mesh={"data": world_size}, parallel={"data": strategy}, passes=(lower,),
        model=PlannedModel.of(model_spec(inner)), changes_training=lower.changes_training,
    )  # fmt: skip
    return parallelize(inner, optimizer, plan)
