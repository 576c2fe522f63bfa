"""A typical training script: plain PyTorch and DDP, without Headway.

torchrun --nproc-per-node 2 examples/train.py

headway record -o trace -- torchrun --nproc-per-node 2 examples/train.py
headway diagnose trace --html report.html
headway optimize trace -o plan.yaml
headway run --plan plan.yaml -- torchrun --nproc-per-node 2 examples/train.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

STEPS, BATCH = 30, 64


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU())]
    model = DDP(nn.Sequential(*layers, nn.Linear(512, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own = torch.Generator().manual_seed(dist.get_rank())
    data = TensorDataset(torch.randn(STEPS * BATCH, 512, generator=own), torch.arange(STEPS * BATCH) % 10)
    for inputs, labels in DataLoader(data, batch_size=BATCH):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
