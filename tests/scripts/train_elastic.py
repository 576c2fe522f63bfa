"""A script for an elastic torchrun: it trains on the same rows with however many ranks there are, from its checkpoint.

python train_elastic.py FOLDER STEPS
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROWS = 12  # as many for each rank, whether they are one, two or three
PAUSE_S = 0.01


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 3)).double()


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.tanh(inputs[:, :3])


def main(folder: Path, steps: int) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    checkpoint, first = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        first = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    wrapped = DistributedDataParallel(model)
    for step in range(first, steps):
        inputs, wanted = rows(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(inputs[rank::world_size]), wanted[rank::world_size]).backward()
        optimizer.step()
        time.sleep(PAUSE_S)
        if step % 10 == 9 and rank == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(
                {"step": step + 1, "workers": world_size, **states}, checkpoint.with_suffix(".partial")
            )
            checkpoint.with_suffix(".partial").replace(checkpoint)
    torch.save(
        {"model": model.state_dict(), "workers": world_size, "from": first}, folder / f"ended-{rank}.pt"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
