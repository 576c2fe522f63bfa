"""A module with a forward of its own as a pipeline: a small residual network over scikit-learn's digits, on two ranks.

torchrun --nproc-per-node 2 examples/pipeline_module.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import headway

BATCH = 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.dropout(self.conv(self.norm(x)).relu())
        return found


class Digits(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList([Block(width) for _ in range(4)])
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        assert images.shape[-1] == 64, "images of 8 by 8"
        x = self.stem(images.view(-1, 1, 8, 8))
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(x.mean(dim=(2, 3)))
        return found


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    images, labels = load_digits(return_X_y=True)
    data, target = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)

    order = headway.strategy("pipeline", order="1f1b", micro_batches=4, split_points=["blocks.2"])
    pipeline: Any = headway.parallelize(
        model, optimizer, order, loss_fn=nn.functional.cross_entropy, example_batch=data[:BATCH]
    )
    for step in range(40):
        chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(step))[:BATCH]
        optimizer.zero_grad()
        loss = pipeline.train_step(data[chosen], target[chosen])
        optimizer.step()
    output = pipeline.evaluate(data[-BATCH:])  # on the last rank, without dropout
    if output is not None:
        right = (output.argmax(1) == target[-BATCH:]).float().mean()
        print(f"loss {loss:.3f}, {right:.0%} of the last {BATCH} digits right")
    model.load_state_dict(pipeline.full_state_dict())  # the whole model, on every rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
