"""Ranks of the tests of parameter servers."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import headway
from headway.compression.cast import Cast
from headway.errors import CommunicationError, UnsupportedError, UserError
from headway.integrations.parallelize import parallelize
from headway.plan import Plan
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.live.module_spec import model_spec
from headway.strategies.parameter_server.policy import ParameterServerStrategy
from headway.strategies.parameter_server.runtime import Servers

STEPS, ROWS = 6, 4


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(
        ROWS, 7, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64
    )


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step, rank)).square().mean()
    return loss


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def alone(world_size: int, accumulate: int) -> list[list[float]]:
    """The parameters after training in one process, on everybody's batches."""
    model = net()
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(accumulate):
            for rank in range(world_size):
                (loss_of(model, step * accumulate + part, rank) / world_size).backward()
        optimizer.step()
    return [p.flatten().tolist() for p in model.parameters()]


def plan_of(model: nn.Module, strategy: Strategy) -> Plan:
    return Plan.data_parallel(strategy, dist.get_world_size(), model_spec(model))


def wrapped_of(strategy: ParameterServerStrategy) -> tuple[Any, torch.optim.Optimizer]:
    model = net()
    optimizer = optimizer_of(model)
    return parallelize(model, optimizer, plan_of(model, strategy)), optimizer


def trained(_rank: int, _world_size: int, strategies: list[dict[str, Any]]) -> dict[str, Any]:
    """The parameters after training under each of ``strategies``, with and without accumulation."""
    found = {}
    for number, options in enumerate(strategies):
        for accumulate in (1, 2):
            wrapped, optimizer = wrapped_of(ParameterServerStrategy(**options))
            for step in range(STEPS):
                optimizer.zero_grad()
                for part in range(accumulate):
                    wrapped.require_backward_grad_sync = part == accumulate - 1
                    loss_of(wrapped, step * accumulate + part, dist.get_rank()).backward()
                optimizer.step()
            found[f"{number} {accumulate}"] = [p.flatten().tolist() for p in wrapped.parameters()]
    return found


def misfits(rank: int, _world_size: int) -> list[str]:
    """What two ranks are told of a plan that was made for three, and of parameters in another order on one of them."""
    said = []
    parameters = [nn.Linear(7, 33), nn.Linear(33, 7)]
    for module, strategy in (
        (net(), ParameterServerStrategy(shares=(1, 2, 3))),
        (nn.ModuleList(parameters[:: -1 if rank else 1]), ParameterServerStrategy()),
    ):
        try:
            parallelize(module, optimizer_of(module), strategy)
        except UserError as error:
            said.append(str(error))
    return said


def divided_by_those_left(_rank: int, _world_size: int) -> list[str]:
    """What a script that divides by the ranks that are left is told, under servers and under codecs."""
    found = []
    for strategy in (
        ParameterServerStrategy(),
        DistributedDataParallelStrategy(wire=(Cast(dtype="bfloat16"),)),
    ):
        model = net().float()
        wrapped: Any = parallelize(model, optimizer_of(model), plan_of(model, strategy))
        try:
            with wrapped.join(divide_by_initial_world_size=False):
                wrapped(batch(0, dist.get_rank()).float()).sum().backward()
        except UnsupportedError as refusal:
            found.append(str(refusal))
    return found


def recorded(_rank: int, _world_size: int, folder: str) -> dict[str, Any]:
    """Record a few steps."""
    with headway.record(Path(folder) / "trace", first_step=1, stop_step=5):
        wrapped, optimizer = wrapped_of(ParameterServerStrategy(bucket_cap_mb=0.001))
        for step in range(5):
            optimizer.zero_grad()
            loss_of(wrapped, step, dist.get_rank()).backward()
            optimizer.step()
    return {}


def bereft(_rank: int, _world_size: int) -> dict[str, Any]:
    """The last rank is killed when DDP has found its buckets; what the others see."""
    wrapped, optimizer = wrapped_of(ParameterServerStrategy(bucket_cap_mb=0.001))
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            if step == 3 and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss_of(wrapped, step, dist.get_rank()).backward()
            optimizer.step()
    except CommunicationError as error:
        print(f"SAID {error}", flush=True)
        os._exit(3)
    return {}


def held_after_rebuilding(_rank: int, _world_size: int) -> list[tuple[int, int]]:
    """After each step: how many buckets of earlier ones are still in memory, and how many of its own.

    There are more channels than buckets, so that some idle for a while behind a bucket that is replaced.
    """
    wrapped, _ = wrapped_of(ParameterServerStrategy(bucket_cap_mb=0.001, channels=8))
    storages: dict[int, weakref.ref[Any]] = {}
    pushed: set[int] = set()
    push = Servers.push

    def watched(self: Servers, buffer: torch.Tensor, bucket: int) -> Any:
        storage = buffer.untyped_storage()
        storages[storage._cdata] = weakref.ref(storage)
        pushed.add(storage._cdata)
        return push(self, buffer, bucket)

    Servers.push = watched  # type: ignore[method-assign]
    found = []
    for step in range(4):
        pushed.clear()
        loss_of(wrapped, step, dist.get_rank()).backward()
        gc.collect()
        alive = {key for key, ref in storages.items() if ref() is not None}
        found.append((len(alive - pushed), len(alive & pushed)))
    return found
