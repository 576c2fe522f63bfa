"""A pipeline whose first stage has most layers, or the same model as the stages of a plan: ``[--plan FILE]``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import headway

MICRO_BATCHES, ROWS, WIDTH, LAYERS, FIRST = 4, 64, 256, 8, 6

parser = argparse.ArgumentParser()
parser.add_argument("--plan", type=Path)
parser.add_argument("--separately", action="store_true", help="each stage counts its layers from 0")
arguments = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
data = torch.randn(MICRO_BATCHES * ROWS, WIDTH, generator=torch.Generator().manual_seed(7))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if arguments.plan:
    plan = headway.Plan.load(arguments.plan)
    trained: Any = headway.parallelize(model, optimizer, plan, loss_fn=nn.functional.mse_loss)
    for _ in range(3):
        optimizer.zero_grad()
        trained.train_step(data, data)
        optimizer.step()
else:
    names = [str(each) for each in (range(FIRST) if rank == 0 else range(FIRST, LAYERS))]
    part = nn.Sequential()
    for name in names:
        part.add_module(
            str(int(name) - FIRST * rank) if arguments.separately else name, model.get_submodule(name)
        )
    schedule = Schedule1F1B(
        PipelineStage(part, rank, 2, torch.device("cpu")), MICRO_BATCHES, loss_fn=nn.functional.mse_loss
    )
    for _ in range(10):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(data)
        else:
            schedule.step(target=data)
        optimizer.step()
dist.destroy_process_group()
