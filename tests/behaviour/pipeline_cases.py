"""What ranks do for the test of pipelines in recordings."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import headway

STEPS, MICRO_BATCHES, ROWS, WIDTH = 4, 4, 2, 16


def recorded(rank: int, world_size: int, folder: str) -> list[float]:
    """Train a pipeline of two ranks; the losses that the last one sees."""
    torch.manual_seed(rank)
    part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    stage = PipelineStage(part, rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    data = torch.ones(MICRO_BATCHES * ROWS, WIDTH)
    seen: list[float] = []
    with headway.record(Path(folder) / "trace", first_step=1, stop_step=STEPS - 1):
        for _ in range(STEPS):
            optimizer.zero_grad()
            losses: list[torch.Tensor] = []
            if rank == 0:
                schedule.step(data)
            else:
                schedule.step(target=data, losses=losses)
            optimizer.step()
            seen += [float(loss.detach()) for loss in losses]
    assert not hasattr(PipelineStage.forward_one_chunk, "__wrapped__")
    return seen
