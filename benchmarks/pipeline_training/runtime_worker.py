"""One rank of a paced pipeline: every method on the same stage's module, in turn."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from headway.scheduling.pipeline.schedule import PipelineSchedule
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.pipeline.runtime import PipelineRuntime
from headway.torch_private.pipelining import PipelineSteps
from pipeline_training.measured import cpu_s, message_ms, passes_ms
from pipeline_training.paced import PacedStage
from pipeline_training.runtime_cases import CASES, PipelineCase
from pipeline_training.stepping import mean_loss, on_torchs_runtime

SIZES = (1, 2, 4)
ROUNDS, QUICK_ROUNDS = 7, 5
Method = Callable[[], None]


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
    stage = PacedStage(case.forward_ms / 1e3)
    methods = {name: _method(make, case, stage) for name, make in _makers(case).items()}
    found: dict[str, Any] = {
        "message_ms": message_ms(case.size_bytes),
        "passes_ms": passes_ms(stage, (case.size_bytes // 4,)),
    }
    for method in methods.values():
        method()  # torch works out shapes, and connections are made
    taken: dict[str, list[float]] = {name: [] for name in methods}
    begun, used = time.monotonic(), cpu_s()
    for _ in range(QUICK_ROUNDS if quick else ROUNDS):
        for name, method in methods.items():
            dist.barrier()
            start = time.monotonic()
            method()
            dist.barrier()
            taken[name].append((time.monotonic() - start) * 1e3)
    found["cpu"] = (
        (cpu_s() - used) * dist.get_world_size() / (time.monotonic() - begun) / (os.cpu_count() or 1)
    )
    found["taken_ms"] = taken
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def _makers(case: PipelineCase) -> dict[str, Callable[[PipelineStage], Any]]:
    count = case.micro_batches

    def ours(schedule: PipelineSchedule) -> Callable[[PipelineStage], Any]:
        def make(stage: PipelineStage) -> Any:
            steps = ScheduleGPipe(stage, count, loss_fn=mean_loss)
            PipelineRuntime(PipelineSteps(steps), schedule)
            return steps

        return make

    def torchs(schedule: PipelineSchedule) -> Callable[[PipelineStage], Any]:
        def make(stage: PipelineStage) -> Any:
            return on_torchs_runtime(stage, count, schedule)

        return make

    planned = {name: each.schedule_of(case.stages) for name, each in strategies(case).items()}
    return {
        "torch GPipe": lambda stage: ScheduleGPipe(stage, count, loss_fn=mean_loss),
        "torch 1F1B": lambda stage: Schedule1F1B(stage, count, loss_fn=mean_loss),
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
