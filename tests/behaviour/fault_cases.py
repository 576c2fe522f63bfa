"""A small job of real ranks, started by hand, in which one rank meets a fault: see ``test_faults``."""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from headway.integrations import activate
from headway.integrations.launch import PLAN_VARIABLE
from headway.plan import Plan
from headway.strategies.base import Strategy
from headway.strategies.live.module_spec import model_spec
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.registry import policy_named

STEPS, FAULT_AT, WIDTH, MICRO_BATCHES = 12, 4, 16, 4
TRIAL_VARIABLE = "HEADWAY_TEST_TRIAL"  # marks every process that ranks start

STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "stock": ("", {}),
    "ddp": ("ddp", {"bucket_cap_mb": 0.001}),
    "int8": ("ddp", {"bucket_cap_mb": 0.001, "wire": [{"codec": "int8"}]}),
    "parameters": ("decoupled", {"tune": False, "gather": "parameters"}),
    "gradients": ("decoupled", {"tune": False, "gather": "gradients"}),
    "servers": ("parameter_server", {"bucket_cap_mb": 0.001}),
    "asynchronous": ("asynchronous-parameter-server", {}),
    "local-sgd": ("local-sgd", {"steps": 2}),
    "static": ("partial-all-reduce", {"groups": "static", "group_size": 2, "time_limit_s": 2}),
    "first-come": ("partial-all-reduce", {"groups": "first-come", "group_size": 2, "time_limit_s": 2}),
    "stale": ("partial-all-reduce", {"groups": "first-come", "staleness": 1, "time_limit_s": 2}),
    "global-division": ("partial-all-reduce", {"groups": "global-division", "group_size": 2, "time_limit_s": 2}),
    "pipeline": ("pipeline", {"micro_batches": MICRO_BATCHES}),
    "following": ("pipeline", {"micro_batches": MICRO_BATCHES, "order": "kfkb", "group_sizes": [2]}),
}  # fmt: skip
"""Plans by the names that trials call them: a strategy and its options."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def stage(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def strategy(name: str) -> Strategy:
    """The strategy of the plan called ``name``."""
    of, options = STRATEGIES[name]
    return policy_named(of)(**options)


def plan(name: str, world_size: int, path: Path) -> str:
    """Where the plan called ``name`` was written; "" where there is none."""
    if not STRATEGIES[name][0]:
        return ""
    decided = strategy(name)
    if isinstance(decided, PipelineStrategy):
        found = Plan.pipeline(decided, [model_spec(stage(each)) for each in range(world_size)])
    else:
        found = Plan.data_parallel(decided, world_size, model_spec(model()))
    found.save(path)
    return str(path)


def meet_fault(kind: str, trial: str) -> None:
    """What happens to the rank that is lost."""
    print("the fault", flush=True)
    Path(trial, "fault").touch()
    if kind == "raise":
        raise ValueError("a bad sample")
    if kind == "sys.exit":
        sys.exit(1)
    if kind == "os._exit":
        os._exit(3)
    if kind != "leaves":
        os.kill(os.getpid(), getattr(signal, f"SIG{kind}"))


def train(
    rank: int, world_size: int, port: int, trial: str, plan_path: str, kind: str, lost: int, limit_s: float
) -> dict[str, Any]:
    """Train, as a rank that was started by hand under ``headway run``, until rank ``lost`` meets the fault ``kind``.

    Returns how many steps this rank made, and how long they took after the fault.
    """
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "LOCAL_RANK": str(rank), TRIAL_VARIABLE: trial, "TMPDIR": trial,
    }  # fmt: skip
    tempfile.tempdir = None
    if plan_path:
        os.environ[PLAN_VARIABLE] = plan_path
        activate.on_torch_import(torch)
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit_s))
    trained, optimizer, step = (
        pipelined(rank, world_size) if plan_path.endswith("pipeline") else replicated(rank)
    )
    for number in range(STEPS):
        if number == FAULT_AT and rank == lost:
            meet_fault(kind, trial)
            if kind == "leaves":  # as after a decision of its own to stop early
                return {"steps": number}
        try:
            step()
        except Exception:  # as trainers save a last checkpoint
            torch.save([trained.state_dict(), optimizer.state_dict()], io.BytesIO())
            print("saved", flush=True)
            raise
        print("step", number, flush=True)
    return {"steps": STEPS}


def replicated(rank: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model that is wrapped in DistributedDataParallel, its optimizer, and what makes a step."""
    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)

    def step() -> None:
        optimizer.zero_grad()
        wrapped(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()

    return wrapped, optimizer, step


def pipelined(rank: int, world_size: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A stage of a pipeline, its optimizer, and what makes a step of all."""
    module = stage(rank)
    built = PipelineStage(module, rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(built, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    batch = torch.randn(2 * MICRO_BATCHES, WIDTH, generator=torch.Generator().manual_seed(7))

    def step() -> None:
        optimizer.zero_grad()
        target = batch if rank == world_size - 1 else None
        schedule.step(*([batch] if rank == 0 else []), target=target)
        optimizer.step()

    return module, optimizer, step
