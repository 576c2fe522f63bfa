"""One rank of a paced pipeline: every method on the same stage's module, in turn."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, schedules

from headway.scheduling.pipeline.schedule import Pass, PipelineSchedule
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.pipeline.runtime import PipelineRuntime
from headway.torch_private.pipelining import PipelineSteps
from pipeline_training.cases import CASES, PipelineCase

SIZES = (1, 2, 4)
ROUNDS, QUICK_ROUNDS = 7, 5
_KINDS = {Pass.FORWARD: "F", Pass.BACKWARD: "B"}
Method = Callable[[], None]


class _Paced(torch.autograd.Function):
    """Hands on what it is given, after a sleep each way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float) -> torch.Tensor:
        ctx.backward_s = 2 * forward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return gradients[0].clone(), None


class _Stage(nn.Module):
    def __init__(self, forward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self._forward_s = forward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Paced.apply(x * self.weight, self._forward_s)  # type: ignore[no-untyped-call]
        return out


def strategies(case: PipelineCase) -> dict[str, PipelineStrategy]:
    """The orders that Headway's runtime is given."""
    count = case.micro_batches
    sizes = [size for size in SIZES if size <= count]
    found = {
        f"headway k={size}": PipelineStrategy(order="kfkb", group_size=size, micro_batches=count)
        for size in sizes
    }
    return {**found, "headway eager": PipelineStrategy(order="eager-1f1b", micro_batches=count)}


def work(case_name: str, out: Path, *, quick: bool) -> None:
    """Measure every method of a case, interleaved; rank 0 writes what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case = CASES[case_name]
    stage = _Stage(case.forward_ms / 1e3)
    methods = {name: _method(make, case, stage) for name, make in _makers(case).items()}
    found: dict[str, Any] = {"message_ms": _message_ms(case), "passes_ms": _passes_ms(case, stage)}
    for method in methods.values():
        method()  # torch works out shapes, and connections are made
    taken: dict[str, list[float]] = {name: [] for name in methods}
    begun, used = time.monotonic(), _cpu_s()
    for _ in range(QUICK_ROUNDS if quick else ROUNDS):
        for name, method in methods.items():
            dist.barrier()
            start = time.monotonic()
            method()
            dist.barrier()
            taken[name].append((time.monotonic() - start) * 1e3)
    found["cpu"] = (
        (_cpu_s() - used) * dist.get_world_size() / (time.monotonic() - begun) / (os.cpu_count() or 1)
    )
    found["taken_ms"] = taken
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def _makers(case: PipelineCase) -> dict[str, Callable[[PipelineStage], Any]]:
    count = case.micro_batches

    def ours(schedule: PipelineSchedule) -> Callable[[PipelineStage], Any]:
        def make(stage: PipelineStage) -> Any:
            steps = ScheduleGPipe(stage, count, loss_fn=_loss)
            PipelineRuntime(PipelineSteps(steps), schedule)
            return steps

        return make

    def torchs(schedule: PipelineSchedule) -> Callable[[PipelineStage], Any]:
        def make(stage: PipelineStage) -> Any:
            steps = schedules._PipelineScheduleRuntime([stage], count, loss_fn=_loss)
            actions = {
                rank: [schedules._Action.from_str(f"{a.stage}{_KINDS[a.kind]}{a.micro_batch}") for a in own]
                for rank, own in enumerate(schedule.ranks)
            }
            steps._prepare_schedule_with_comms(actions)
            return steps

        return make

    planned = {name: each.schedule_of(case.stages) for name, each in strategies(case).items()}
    return {
        "torch GPipe": lambda stage: ScheduleGPipe(stage, count, loss_fn=_loss),
        "torch 1F1B": lambda stage: Schedule1F1B(stage, count, loss_fn=_loss),
        **{name.replace("headway", "torch runtime"): torchs(schedule) for name, schedule in planned.items()},
        **{name: ours(schedule) for name, schedule in planned.items()},
    }


def _method(make: Callable[[PipelineStage], Any], case: PipelineCase, module: nn.Module) -> Method:
    """A step of a schedule on a stage of its own: torch's stages do not take two schedules in turn."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    steps = make(PipelineStage(module, rank, stages, torch.device("cpu")))
    batch = torch.ones(case.micro_batches, case.size_bytes // 4)

    def step() -> None:
        module.zero_grad()
        if rank == 0:
            steps.step(batch)
        elif rank == stages - 1:
            steps.step(target=batch, losses=[])
        else:
            steps.step()

    return step


def _loss(output: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
    return output.mean()


def _message_ms(case: PipelineCase) -> float:
    """What one message from rank 0 to rank 1 takes that rank 1 waits for, on links that have rested."""
    tensor, token = torch.zeros(case.size_bytes // 4), torch.zeros(1)
    taken = []
    for _ in range(5):
        dist.barrier()
        time.sleep(0.2)
        if dist.get_rank() == 1:
            receive = dist.irecv(tensor, 0)
            assert receive is not None
            dist.send(token, 0)
            start = time.monotonic()
            receive.wait()
            taken.append((time.monotonic() - start) * 1e3)
        elif dist.get_rank() == 0:
            dist.recv(token, 1)
            dist.send(tensor, 1)
    found = torch.tensor([median(taken) if taken else 0.0])
    dist.broadcast(found, 1)
    return float(found)


def _passes_ms(case: PipelineCase, stage: nn.Module) -> tuple[float, float]:
    """A forward and a backward of one micro-batch, alone."""
    batch = torch.ones(1, case.size_bytes // 4, requires_grad=True)
    taken = []
    for _ in range(3):
        start = time.monotonic()
        output = stage(batch)
        middle = time.monotonic()
        output.mean().backward()
        taken.append(((middle - start) * 1e3, (time.monotonic() - middle) * 1e3))
    return median(one for one, _ in taken), median(other for _, other in taken)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
