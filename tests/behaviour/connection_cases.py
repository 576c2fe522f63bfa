"""What ranks do for the tests of what wrapped models leave behind: threads, descriptors, wake-ups."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from headway.strategies.decoupled.wrapper import DecoupledDataParallel
from headway.strategies.parameter_server.policy import ParameterServerStrategy
from headway.strategies.parameter_server.runtime import wrap

LONGEST_S = 30.0
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "decoupled": DecoupledDataParallel,
    "parameter_server": lambda module: wrap(module, ParameterServerStrategy()),
}


def held() -> tuple[int, int]:
    """The threads and the file descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def train_and_let_go(wrapper: Callable[[nn.Module], nn.Module]) -> None:
    wrapped = wrapper(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        wrapped(torch.ones(4, 8)).sum().backward()
        optimizer.step()


def many_models(rank: int, world_size: int, kind: str, count: int) -> dict[str, Any]:
    """Wrap, train and let go of ``count`` models; what is held with DDP, at most from the tenth on, and at last."""
    train_and_let_go(nn.parallel.DistributedDataParallel)
    before = held()
    most = (0, 0)
    for number in range(count):
        train_and_let_go(WRAPPERS[kind])
        gc.collect()
        if number >= 10:
            threads, descriptors = held()
            most = max(most[0], threads), max(most[1], descriptors)
        elif number == 9:
            tenth = held()
    dist.barrier()
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    deadline = time.monotonic() + LONGEST_S
    while held() != before and time.monotonic() < deadline:
        time.sleep(0.2)
        optimizer.step()  # where ranks look whether the others have let go as well
    return {"before": before, "tenth": tenth, "most": most, "after": held()}


def waking_threads(rank: int, world_size: int) -> dict[str, int]:
    """How many threads of an idle process wake again and again, with stock DDP and with a decoupled model."""
    found = {}
    for name, wrapper in (("ddp", nn.parallel.DistributedDataParallel), *WRAPPERS.items()):
        wrapped = wrapper(nn.Linear(8, 8))
        wrapped(torch.ones(4, 8)).sum().backward()
        before = _wake_ups()
        time.sleep(2.0)
        after = _wake_ups()
        found[name] = sum(after[thread] - before.get(thread, 0) >= 20 for thread in after)
        dist.barrier()
    return found


def _wake_ups() -> dict[str, int]:
    wake_ups = {}
    for task in Path("/proc/self/task").iterdir():
        lines = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        wake_ups[task.name] = int(lines["voluntary_ctxt_switches"])
    return wake_ups
