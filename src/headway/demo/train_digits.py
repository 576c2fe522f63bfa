"""A small convolutional net on scikit-learn's digits: plain PyTorch and DDP, nothing of Headway.

torchrun --nproc-per-node 2 train_digits.py --steps 30 --curve curve.json
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from headway.demo.step_log import StepLog


def convolutional_net(width: int = 128) -> nn.Module:
    """Three convolutions with batch norm and two dense layers, for 8 x 8 images of ten digits."""

    def stage(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    return nn.Sequential(
        *stage(1, width), *stage(width, width), nn.MaxPool2d(2), *stage(width, 2 * width), nn.Flatten(),
        nn.Linear(2 * width * 16, 512), nn.ReLU(inplace=True), nn.Linear(512, 10),
    )  # fmt: skip


def main() -> None:
    """Train, and log losses and step times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--curve", type=Path)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, seed=0)
    loader = DataLoader(data, arguments.batch, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(convolutional_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    log = StepLog(arguments.curve)
    epochs = arguments.steps // len(loader) + 1
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for image, label in islice(loader, max(0, arguments.steps - epoch * len(loader))):
            loss = cross_entropy(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.step(loss)
    log.write()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
