"""What ranks do for the tests of changes that break off, and of scripts on which the tuner tries no stock DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.behaviour.adaptive_models import adaptive
from tests.behaviour.decoupled.partial_cases import Branches
from tests.behaviour.tuning_cases import OPTIMIZERS, STEPS, Script, batch, forms_of, net, schedule_of
from torch import nn

from headway.errors import CommunicationError, UnsupportedError
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.live.module_spec import model_spec

OTHER_BUCKETS = DistributedDataParallelStrategy(bucket_cap_mb=0.001)


def _no_room(*_: Any, **__: Any) -> None:
    raise MemoryError("no room")


def broken_off(rank: int, world_size: int, change: str) -> bool:
    """A change that finds no memory, and training that is refused behind it: whether evaluation goes on."""
    wrapped: Any = adaptive(net(), DecoupledStrategy(bucket_cap_bytes=512))
    script = Script(wrapped, OPTIMIZERS["adam"](wrapped.parameters()), rank, world_size)
    script.run(2)
    other = schedule_of(model_spec(wrapped.module), 128, "parameters", 1)
    changes: dict[str, Callable[[], Any]] = {
        "ours to ours": lambda: wrapped.reschedule(other),
        "stock to ours": lambda: wrapped.reschedule(other),
        "stock to stock": lambda: wrapped.use_stock_ddp(OTHER_BUCKETS),
    }
    if change != "ours to ours":
        wrapped.use_stock_ddp(keep_connections=True)
        script.run(2)
    if change == "stock to stock":
        wrapped._stock.begin = _no_room
    else:
        wrapped.engine._install = _no_room
    with pytest.raises(MemoryError, match="no room"):
        changes[change]()
    x, _ = batch(0, rank, world_size)
    with torch.no_grad():
        evaluates = bool(wrapped(x).isfinite().all())
    for trying in (lambda: wrapped(x), lambda: wrapped.reschedule(other), wrapped.use_stock_ddp):
        with pytest.raises(CommunicationError, match="broke off half-way"):
            trying()
    return evaluates


def not_between_steps(rank: int, world_size: int) -> list[str]:
    """Changes asked for within a backward change nothing, and training goes on; what they are refused with."""
    wrapped: Any = adaptive(net(), DecoupledStrategy(bucket_cap_bytes=512))
    other = schedule_of(model_spec(wrapped.module), 128, "parameters", 1)
    changes = [wrapped.use_stock_ddp, lambda: wrapped.reschedule(other)]
    found: list[str] = []

    def trying(gradient: torch.Tensor) -> torch.Tensor:
        for change in changes:
            with pytest.raises((RuntimeError, UnsupportedError)) as refused:
                change()
            found.append(str(refused.value))
        return gradient

    x, _ = batch(0, rank, world_size)
    for _ in range(2):
        handle = wrapped.module[0].weight.register_hook(trying)
        wrapped(x).sum().backward()
        handle.remove()
        wrapped.use_stock_ddp(keep_connections=True)
        changes[0] = lambda: wrapped.use_stock_ddp(OTHER_BUCKETS)
    wrapped(x).sum().backward()
    return found


def several_forwards_of_other_branches(rank: int, world_size: int) -> tuple[list[str], str]:
    """The tuner on a script that only ours trains: stock DDP looks at the last forward's branches alone."""
    wrapped: Any = adaptive(
        Branches(), DecoupledStrategy(bucket_cap_bytes=512), tune=True, find_unused_parameters=True
    )
    optimizer = OPTIMIZERS["sgd"](wrapped.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step, rank, world_size)
        first, second = (nn.functional.mse_loss(wrapped(x, (branch,)), y) for branch in range(2))
        (first + second).backward()
        optimizer.step()
    return forms_of(wrapped.tuning), wrapped.tuning.describe()
