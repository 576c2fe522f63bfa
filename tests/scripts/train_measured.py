"""A job that prints, when it is done, its last loss, a random number, and the threads and descriptors it holds."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(12):
    loss = model(torch.randn(8, 64)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
held = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
if dist.get_rank() == 0:
    print(f"{loss.item()!r} {torch.randn(1).item()!r} {torch.get_default_dtype()} {held}", flush=True)
dist.destroy_process_group()
