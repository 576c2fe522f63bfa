"""A job whose samples take their time: ``torchrun train_loading.py [--out FILE]`` says what was loaded, and where."""

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
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

STEPS, BATCH = 12, 4


class Samples(Dataset[tuple[torch.Tensor, int, int]]):
    def __init__(self, count: int) -> None:
        self.values = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        time.sleep(0.002)
        return self.values[index], index, os.getpid()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    samples = Samples(STEPS * BATCH * dist.get_world_size())
    loaded, losses = [], []
    elsewhere = True
    for batch, indices, processes in DataLoader(
        samples, batch_size=BATCH, sampler=DistributedSampler(samples)
    ):
        optimizer.zero_grad()
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
        loaded += indices.tolist()
        elsewhere &= os.getpid() not in processes.tolist()
    if arguments.out and os.environ["RANK"] == "0":
        arguments.out.write_text(json.dumps({"loaded": loaded, "losses": losses, "elsewhere": elsewhere}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
