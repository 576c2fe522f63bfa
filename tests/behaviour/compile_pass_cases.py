"""Ranks whose modules run compiled, by a plan, and a single process that does what they do together."""

from __future__ import annotations

from typing import Any

import torch
from tests.behaviour.pass_cases import STRATEGIES, model, momentum
from torch import nn

from headway.integrations.parallelize import parallelize
from headway.passes import compiled_modules
from headway.passes.compile import Compile
from headway.plan import Plan
from headway.plan.plan import PlannedModel
from headway.strategies.base import Strategy
from headway.strategies.data_parallel.module_spec import model_spec

STEPS = 4
EXPECTED_GRAPHS = 2  # of the first block, whose input needs no gradient, and of the others, which are alike


def _batches(rank: int) -> list[torch.Tensor]:
    data = torch.Generator().manual_seed(rank)
    return [torch.randn(6, 8, generator=data, dtype=torch.float64) for _ in range(STEPS)]


def _parameters(of: nn.Module) -> list[float]:
    return torch.cat([each.detach().flatten() for each in of.parameters()]).tolist()


class CallsByName(nn.Module):
    """Calls forwards and no modules, so that no hook of a module runs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = model(plain=True)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for each in self.body:
            given = each.forward(given)
        return given


def _alone(world_size: int) -> list[float]:
    one = model(plain=True)
    optimizer = momentum(one.parameters())
    for batches in zip(*map(_batches, range(world_size)), strict=True):
        optimizer.zero_grad()
        for batch in batches:
            (one(batch).square().mean() / world_size).backward()
        optimizer.step()
    return _parameters(one)


def trained(rank: int, world_size: int) -> dict[str, Any]:
    """Parameters after some steps under each strategy, looked at in between, and of the single process."""
    compiled_modules.BACKEND = "aot_eager"
    found: dict[str, Any] = {"alone": _alone(world_size)}
    for name, strategy in STRATEGIES.items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        inner = model(plain=True)
        plan = Plan(
            mesh={"data": world_size}, parallel={"data": strategy}, passes=(Compile(modules=("0", "1", "2")),),
            model=PlannedModel.of(model_spec(inner)),
        )  # fmt: skip
        optimizer = momentum(inner.parameters())
        wrapped = parallelize(inner, optimizer, plan)
        for batch in _batches(rank):
            optimizer.zero_grad()
            wrapped(batch).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                wrapped(batch)
        found[name] = _parameters(inner)
        found[f"{name}: graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found[f"{name}: by name"] = _by_name(rank, world_size, strategy)
    return found


def _by_name(rank: int, world_size: int, strategy: Strategy) -> list[float]:
    inner = CallsByName()
    plan = Plan(
        mesh={"data": world_size}, parallel={"data": strategy}, passes=(Compile(modules=("body.0", "body.2")),),
        model=PlannedModel.of(model_spec(inner)),
    )  # fmt: skip
    optimizer = momentum(inner.parameters())
    wrapped = parallelize(inner, optimizer, plan)
    for batch in _batches(rank):
        optimizer.zero_grad()
        wrapped(batch).square().mean().backward()
        optimizer.step()
    return _parameters(inner)
