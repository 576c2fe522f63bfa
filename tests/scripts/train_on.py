"""A training job that does not let go: ``torchrun train_on.py`` catches whatever ends a step, SystemExit too."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 40


def main() -> None:
    dist.init_process_group("gloo")
    model = DDP(nn.Linear(20, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        try:
            optimizer.zero_grad()
            model(torch.ones(4, 20)).square().mean().backward()
            optimizer.step()
        except BaseException as caught:
            print(f"caught {type(caught).__name__}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
