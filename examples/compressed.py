"""Compressed gradients: the script's own DDP job, with int8 gradients from step 0, saved and gone on with.

torchrun --nproc-per-node 2 examples/compressed.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import headway


def build(**options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return headway.parallelize(model, optimizer, headway.strategy("ddp", **options)), optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> float:
    for step in steps:
        own = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(32, 64, generator=own)
        loss: torch.Tensor = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    whole = train(*build(), range(200))

    wire = [{"codec": "int8"}]
    model, optimizer = build(wire=wire)
    train(model, optimizer, range(100))
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "compression": headway.compression_state(model),  # this rank's own
    }
    torch.save(state, folder / f"{dist.get_rank()}.pt")

    model, optimizer = build(wire=wire)
    state = torch.load(folder / f"{dist.get_rank()}.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    headway.load_compression_state(model, state["compression"])
    compressed = train(model, optimizer, range(100, 200))
    if dist.get_rank() == 0:
        print(f"loss {whole:.4f} with whole gradients, {compressed:.4f} with int8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
