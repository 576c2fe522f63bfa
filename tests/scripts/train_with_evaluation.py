"""Trains on two ranks; rank 0 starts an evaluation meanwhile, with a process group of its own. ``torchrun`` it.

``train_with_evaluation.py evaluate`` is that evaluation: it trains a probe, which is not the job.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 12


def train(model: nn.Module, inputs: torch.Tensor, evaluates_at: int = -1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        if step == evaluates_at and dist.get_rank() == 0:
            evaluate()


def evaluate() -> None:
    ranks = {name: str(value) for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ended = subprocess.run(
        [sys.executable, __file__, "evaluate"], check=False, env={**environment, **ranks, **meeting},
        stdout=sys.stdout, stderr=sys.stderr,
    )  # fmt: skip
    print(f"evaluation ended with {ended.returncode}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["evaluate"]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        train(DDP(nn.Linear(8, 8)), torch.ones(2, 8))
    else:
        dist.init_process_group("gloo")
        train(DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))), torch.ones(2, 8), 1)
    dist.destroy_process_group()
