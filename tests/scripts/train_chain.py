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
from torch.nn.parallel import DistributedDataParallel

import headway

ROWS, WIDTH = 8, 96


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--losses", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)]
    model = nn.Sequential(nn.Linear(20, WIDTH), *blocks, nn.Linear(WIDTH, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(ROWS * ranks, 20, generator=data), torch.randn(ROWS * ranks, 5, generator=data))
        for _ in range(arguments.steps)
    ]
    losses = []
    trained: Any
    if arguments.plan:
        trained = headway.parallelize(
            model, optimizer, headway.Plan.load(arguments.plan), loss_fn=nn.functional.mse_loss
        )
    else:
        trained = DistributedDataParallel(model)
    for batch, target in batches:
        optimizer.zero_grad()
        if arguments.plan:
            loss = trained.train_step(batch, target)
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
