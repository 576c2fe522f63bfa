"""One rank's stage of a case, and steps of it under torch's schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from headway.scheduling.pipeline.schedule import PipelineSchedule
from pipeline_training.network_cases import NetworkCase
from pipeline_training.paced import PacedStage


def stage_of(case: NetworkCase) -> nn.Module:
    """This rank's module."""
    rank, model = dist.get_rank(), case.model
    if not model.is_paced:
        torch.manual_seed(rank)
        return nn.TransformerEncoderLayer(model.width, 8, 4 * model.width, dropout=0.0, batch_first=True)
    given, sizes = model.input_shape(rank)[0], model.boundary_bytes
    factor = sizes[rank] / given / 4 if rank < len(sizes) else 1.0
    return PacedStage(model.forwards_ms[rank] / 1e3, factor)


def step_of(case: NetworkCase, module: nn.Module, steps: Any) -> Callable[[], None]:
    """A forward and backward of all micro-batches, by a schedule of torch's, of whatever runtime."""
    rank, count = dist.get_rank(), case.micro_batches
    batch = torch.ones(count, *case.model.input_shape(0))
    target = torch.ones(count, 1)

    def step() -> None:
        module.zero_grad()
        if rank == 0:
            steps.step(batch)
        elif rank == case.stages - 1:
            steps.step(target=target, losses=[], return_outputs=False)
        else:
            steps.step()

    return step


def on_torchs_runtime(stage: PipelineStage, micro_batches: int, schedule: PipelineSchedule) -> Any:
    """Torch's own runtime of schedules, given an order of ours."""
    steps = schedules._PipelineScheduleRuntime([stage], micro_batches, loss_fn=mean_loss)
    actions = {
        rank: [schedules._Action.from_str(f"{a.stage}{a.kind.value}{a.micro_batch}") for a in own]
        for rank, own in enumerate(schedule.ranks)
    }
    steps._prepare_schedule_with_comms(actions)
    return steps


def mean_loss(output: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
    """A loss that needs no target."""
    return output.mean()
