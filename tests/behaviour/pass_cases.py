"""Ranks that train under a plan with passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from headway.integrations.parallelize import parallelize
from headway.passes.accumulate import Accumulate
from headway.passes.base import Pass
from headway.passes.recompute import Recompute
from headway.plan import Plan
from headway.plan.plan import PlannedModel
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.live.module_spec import model_spec

STEPS = 4
STRATEGIES: dict[str, Strategy] = {
    "ddp": DistributedDataParallelStrategy(),
    "decoupled gradients": DecoupledStrategy(gather="gradients"),
    "decoupled parameters": DecoupledStrategy(gather="parameters"),
}


def model(*, plain: bool) -> nn.Sequential:
    """Three blocks; where ``plain``, of nothing that knows of its batch or draws random numbers."""
    first, third = (nn.LayerNorm, 0.0) if plain else (nn.BatchNorm1d, 0.4)
    with torch.device("cpu"):  # the same values wherever it is trained
        torch.manual_seed(0)
        blocks = [nn.Sequential(first(8), nn.Linear(8, 8), nn.Dropout(third), nn.Tanh()) for _ in range(3)]
        built = nn.Sequential(*blocks, nn.Linear(8, 2)).double()
    return built.to(torch.get_default_device())


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batches(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What a rank trains on, in order."""
    data = torch.Generator().manual_seed(rank)
    drawn = [torch.randn(6, 8, generator=data, dtype=dtype, device="cpu") for _ in range(STEPS)]
    return [each.to(torch.get_default_device()) for each in drawn]


def parameters_of(of: nn.Module) -> list[float]:
    return torch.cat([each.detach().flatten() for each in of.parameters()]).tolist()


def train(
    inner: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy, rank: int, world_size: int,
    *passes: Pass, evaluates: bool = False,
) -> None:  # fmt: skip
    """Some steps of ``inner`` under a plan, each followed by a forward without gradients where it ``evaluates``."""
    plan = Plan(
        mesh={"data": world_size}, parallel={"data": strategy}, passes=passes,
        model=PlannedModel.of(model_spec(inner)),
    )  # fmt: skip
    wrapped = parallelize(inner, optimizer, plan)
    torch.manual_seed(rank)
    for batch in batches(rank, next(inner.parameters()).dtype):
        optimizer.zero_grad()
        wrapped(batch).square().mean().backward()
        optimizer.step()
        if evaluates:
            with torch.no_grad():
                wrapped(batch)


def trained_alone(
    one: nn.Module, world_size: int, forward: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> list[float]:
    """Parameters of ``one`` after a single process has trained it on the batches of all ranks."""
    optimizer, dtype = momentum(one.parameters()), next(one.parameters()).dtype
    for step in zip(*(batches(rank, dtype) for rank in range(world_size)), strict=True):
        optimizer.zero_grad()
        for batch in step:
            ((forward or one)(batch).square().mean() / world_size).backward()
        optimizer.step()
    return parameters_of(one)


def trained(
    strategy: Strategy, rank: int, world_size: int, passes: tuple[Pass, ...], *, plain: bool,
    optimizer_of: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = momentum,
) -> tuple[list[float], torch.optim.Optimizer]:  # fmt: skip
    """Sums of parameters after some steps of a plan, and the optimizer that made them."""
    inner = model(plain=plain)
    optimizer = optimizer_of(inner.parameters())
    train(inner, optimizer, strategy, rank, world_size, *passes)
    return [each.sum().item() for each in inner.parameters()], optimizer


def both(rank: int, world_size: int, named: str) -> dict[str, Any]:
    """For each strategy, sums of parameters without and with the pass ``named``."""
    recompute: Pass = Recompute(modules=("0", "1", "2"))
    passes = {"recompute": recompute, "accumulate": Accumulate(micro_batches=3)}
    return {
        name: [
            trained(strategy, rank, world_size, own, plain=named == "accumulate")[0]
            for own in ((), (passes[named],))
        ]
        for name, strategy in STRATEGIES.items()
    }
