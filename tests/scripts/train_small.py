"""A small training job of plain PyTorch, for tests: ``torchrun train_small.py [--fault FAULT] [--losses FILE]``."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument(
        "--fault", choices=["none", "crash", "never-step", "no-group", "late-crash", "hang"], default="none"
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--norm", choices=["batch", "layer"], default="batch")
    parser.add_argument("--losses", type=Path)
    arguments = parser.parse_args()
    if arguments.fault == "no-group":
        return
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    width = arguments.width
    norm = nn.BatchNorm1d if arguments.norm == "batch" else nn.LayerNorm
    model = DDP(
        nn.Sequential(
            nn.Linear(20, width), norm(width), nn.ReLU(inplace=True), nn.Linear(width, width),
            nn.ReLU(inplace=True), nn.Linear(width, 5),
        )
    )  # fmt: skip
    if arguments.fault == "hang":
        time.sleep(3600)
    if arguments.fault == "crash":
        raise RuntimeError("planted crash")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(arguments.batch * arguments.steps, 20, generator=data)
    losses = []
    for number, (batch,) in enumerate(DataLoader(TensorDataset(inputs), batch_size=arguments.batch)):
        loss = (model(batch) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if arguments.fault != "never-step":
            optimizer.step()
        reported = loss.detach().clone()
        dist.all_reduce(reported)
        losses.append(float(reported))
        if arguments.fault == "late-crash" and number == 10:
            raise RuntimeError("planted crash")
    if arguments.losses and os.environ["RANK"] == "0":
        checksum = sum(float(p.detach().double().sum()) for p in model.parameters())
        arguments.losses.write_text(json.dumps({"losses": losses, "checksum": checksum}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
