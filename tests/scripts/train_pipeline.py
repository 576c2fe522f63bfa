"""A pipeline of torch.distributed.pipelining as its documentation builds one: a stage a rank, or two, one schedule."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

MICRO_BATCHES, ROWS, WIDTH = 4, 2, 32

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--gpipe", action="store_true")
parser.add_argument("--interleaved", action="store_true")
parser.add_argument("--micro-batches", type=int, default=MICRO_BATCHES)
parser.add_argument("--samples", type=int, help="in a batch")
parser.add_argument("--no-dropout", action="store_true")
parser.add_argument(
    "--summed", action="store_true", help="add losses up, which another number of them changes"
)
parser.add_argument("--losses", type=Path)
arguments = parser.parse_args()

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
device = torch.device("cpu")
if arguments.interleaved:  # without dropout: in another order a rank would draw its stages' masks in another
    numbers = (rank, rank + world_size)
    widths = (WIDTH, *(16 + 8 * each for each in range(2 * world_size - 1)), WIDTH)
    parts = [nn.Sequential(nn.Linear(widths[each], widths[each + 1]), nn.Tanh()) for each in numbers]
    stages: list[Any] = [
        PipelineStage(part, each, 2 * world_size, device) for each, part in zip(numbers, parts, strict=True)
    ]
    schedule: Any = ScheduleInterleaved1F1B(stages, arguments.micro_batches, loss_fn=nn.functional.mse_loss)
else:
    parts = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0 if arguments.no_dropout else 0.1), nn.Tanh())
    ]
    stage = PipelineStage(parts[0], rank, world_size, device)
    kind = ScheduleGPipe if arguments.gpipe else Schedule1F1B
    loss = nn.MSELoss(reduction="sum" if arguments.summed else "mean")
    schedule = kind(stage, arguments.micro_batches, loss_fn=loss)
optimizer = torch.optim.AdamW([each for part in parts for each in part.parameters()], lr=0.01)
generator = torch.Generator().manual_seed(7)
data = torch.randn(arguments.samples or arguments.micro_batches * ROWS, WIDTH, generator=generator)
seen: list[float] = []
for _ in range(arguments.steps):
    optimizer.zero_grad()
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(data)
    elif rank == world_size - 1:
        schedule.step(target=data, losses=losses)
    else:
        schedule.step()
    optimizer.step()
    seen += [float(loss.detach()) for loss in losses]
if arguments.losses and rank == world_size - 1:
    arguments.losses.write_text(json.dumps(seen))
dist.destroy_process_group()
