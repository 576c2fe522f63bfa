"""Pipelines side by side on a mesh of stages and replicas: each stage is wrapped in DDP along the data dimension."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES = 4


class Paced(torch.autograd.Function):
    """Hands on what it is given, after a sleep each way: devices that leave the CPU free."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float) -> torch.Tensor:
        ctx.backward_s = 2 * forward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return gradients[0].clone(), None


class Device(nn.Module):
    """A layer that takes a time and has no parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Paced.apply(x, arguments.pace_ms / 1e3)  # type: ignore[no-untyped-call]
        return out


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--stages", type=int, default=2)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--rows", type=int, default=2)
parser.add_argument("--pace-ms", type=float, default=0)
parser.add_argument("--data-first", action="store_true")
parser.add_argument("--weights", type=Path)
parser.add_argument("--gpipe", action="store_true")
arguments = parser.parse_args()

dist.init_process_group("gloo")
replicas = dist.get_world_size() // arguments.stages
sizes = {"pipeline": arguments.stages, "data": replicas}
if arguments.data_first:
    sizes = {"data": replicas, "pipeline": arguments.stages}
mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
index, width = mesh.get_local_rank("pipeline"), arguments.width
torch.manual_seed(index)
part = nn.Sequential(nn.Linear(width, width), Device(), nn.Linear(width, width), Device())
wrapped = DistributedDataParallel(part, process_group=mesh.get_group("data"), bucket_cap_mb=25)
device = torch.device("cpu")
stage = PipelineStage(wrapped, index, arguments.stages, device, group=mesh.get_group("pipeline"))
kind = ScheduleGPipe if arguments.gpipe else Schedule1F1B
schedule = kind(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(mesh.get_local_rank("data"))
data = torch.randn(MICRO_BATCHES * arguments.rows, width, generator=generator)
for _ in range(arguments.steps):
    optimizer.zero_grad()
    if index == 0:
        schedule.step(data)
    elif index == arguments.stages - 1:
        schedule.step(target=data)
    else:
        schedule.step()
    optimizer.step()
if arguments.weights:
    torch.save(part.state_dict(), f"{arguments.weights}.{dist.get_rank()}")
dist.destroy_process_group()
