"""Headway in code: record some steps of a job, choose a plan from them, continue training under it.

torchrun --nproc-per-node 2 examples/in_code.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import headway


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    own = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        loss: torch.Tensor = model(torch.randn(32, 256, generator=own)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss)


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    model, optimizer = build()
    with headway.record(folder / "trace", first_step=3, stop_step=10):
        stock = train(DDP(model), optimizer, 12)
    if dist.get_rank() == 0:
        trace = headway.load_trace(folder / "trace")
        print(headway.diagnose(trace).verdict)
        print(
            f"on links twice as fast: {headway.replay(trace, what_if=['bandwidth=2x']).step_ms:.1f} ms a step"
        )
        headway.optimize(trace).plan.save(folder / "plan.yaml")
    dist.barrier()

    model, optimizer = build()
    planned = headway.parallelize(model, optimizer, headway.Plan.load(folder / "plan.yaml"))
    again = train(planned, optimizer, 12)
    if dist.get_rank() == 0:
        print(f"loss {stock:.6f} under stock DDP, {again:.6f} under the plan")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
