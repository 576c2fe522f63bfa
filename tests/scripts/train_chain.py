"""A chain of modules, data parallel or as the pipeline of a plan: ``torchrun train_chain.py [--plan FILE]``."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import headway

ROWS, WIDTH = 8, 96


class Residual(nn.Module):
    """Its chain is inside of it, under a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(20, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(x.relu())
        return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--losses", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--residual", action="store_true", help="a model that is no Sequential")
    parser.add_argument("--mesh", action="store_true", help="pipelines side by side, as the plan says")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)]
    model: nn.Module = nn.Sequential(nn.Linear(20, WIDTH), *blocks, nn.Linear(WIDTH, 5))
    if arguments.residual:
        model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(ROWS * ranks, 20, generator=data), torch.randn(ROWS * ranks, 5, generator=data))
        for _ in range(arguments.steps)
    ]
    losses = []
    trained: Any
    mesh, pipelines, pipeline = None, 1, 0
    if arguments.plan:
        plan = headway.Plan.load(arguments.plan)
        if arguments.mesh:
            assert plan.mesh is not None
            mesh = init_device_mesh("cpu", tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
            pipelines, pipeline = mesh["data"].size(), mesh.get_local_rank("data")
        example = batches[0][0].chunk(pipelines)[0] if arguments.residual else None
        trained = headway.parallelize(
            model, optimizer, plan, loss_fn=nn.functional.mse_loss, example_batch=example,
            **({"mesh": mesh} if mesh is not None else {}),
        )  # fmt: skip
    else:
        trained = DistributedDataParallel(model)
    for batch, target in batches:
        optimizer.zero_grad()
        if arguments.plan:
            loss = trained.train_step(batch.chunk(pipelines)[pipeline], target.chunk(pipelines)[pipeline])
        else:
            own = slice(rank * ROWS, (rank + 1) * ROWS)
            loss = nn.functional.mse_loss(trained(batch[own]), target[own])
            loss.backward()
        optimizer.step()
        said = loss.detach().double() / ranks
        dist.all_reduce(said)
        losses.append(float(said))
    if arguments.losses and os.environ["RANK"] == "0":
        arguments.losses.write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
