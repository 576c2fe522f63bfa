"""An ordinary module as a pipeline: a Sequential over scikit-learn's digits, a stage on each rank.

torchrun --nproc-per-node 2 examples/pipeline.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import headway

BATCH = 64


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(), nn.Flatten(), nn.Linear(32 * 64, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images, labels = load_digits(return_X_y=True)
    data, target = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)

    order = headway.strategy("pipeline", order="kfkb", group_size=2, micro_batches=4)
    pipeline: Any = headway.parallelize(model, optimizer, order, loss_fn=nn.functional.cross_entropy)
    for step in range(40):
        chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(step))[:BATCH]
        optimizer.zero_grad()
        loss = pipeline.train_step(data[chosen], target[chosen])
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()
    output = pipeline.evaluate(data[-BATCH:])  # on the last rank
    if output is not None:
        right = (output.argmax(1) == target[-BATCH:]).float().mean()
        print(f"loss {loss:.3f}, {right:.0%} of the last {BATCH} digits right")
    model.load_state_dict(pipeline.full_state_dict())  # the whole model, on every rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
