"""Ranks that compute under autocast, by a plan, and a single process that does what they do together."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tests.behaviour.pass_cases import STRATEGIES, model, momentum
from torch import nn

from headway.integrations.parallelize import parallelize
from headway.passes.precision import Precision
from headway.plan import Plan
from headway.plan.plan import PlannedModel
from headway.strategies.data_parallel.module_spec import model_spec

STEPS = 4


def _batches(rank: int) -> list[torch.Tensor]:
    data = torch.Generator().manual_seed(rank)
    return [torch.randn(6, 8, generator=data) for _ in range(STEPS)]


def _parameters(of: nn.Module) -> list[float]:
    return torch.cat([each.detach().flatten() for each in of.parameters()]).tolist()


def alone(world_size: int, *, lower: bool) -> list[float]:
    """Parameters after a single process has trained on the batches of all ranks."""
    one = model(plain=True).float()
    optimizer = momentum(one.parameters())
    for batches in zip(*map(_batches, range(world_size)), strict=True):
        optimizer.zero_grad()
        for batch in batches:
            context: AbstractContextManager[Any] = (
                torch.autocast("cpu", dtype=torch.bfloat16) if lower else nullcontext()
            )
            with context:
                out = one(batch)
            (out.float().square().mean() / world_size).backward()
        optimizer.step()
    return _parameters(one)


def trained(rank: int, world_size: int) -> dict[str, list[float]]:
    """Parameters after some steps under each strategy, and of the single process in both precisions."""
    found = {"alone": alone(world_size, lower=True), "float32": alone(world_size, lower=False)}
    for name, strategy in STRATEGIES.items():
        inner = model(plain=True).float()
        plan = Plan(
            mesh={"data": world_size}, parallel={"data": strategy}, passes=(Precision(dtype="bfloat16"),),
            model=PlannedModel.of(model_spec(inner)),
        )  # fmt: skip
        optimizer = momentum(inner.parameters())
        wrapped = parallelize(inner, optimizer, plan)
        for batch in _batches(rank):
            optimizer.zero_grad()
            wrapped(batch).square().mean().backward()
            optimizer.step()
        found[name] = _parameters(inner)
    return found
