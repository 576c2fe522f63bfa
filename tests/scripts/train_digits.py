"""Pictures in ten classes, as people train them with DistributedDataParallel: ``train_digits.py --save FILE``."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.fc2(nn.functional.relu(self.fc1(x)))
        return scores


def data() -> tuple[TensorDataset, TensorDataset]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (1797,), generator=generator)
    images = torch.rand(10, 64, generator=generator)[labels] + torch.randn(1797, 64, generator=generator)
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def train(
    args: argparse.Namespace,
    model: nn.Module,
    loader: DataLoader[tuple[torch.Tensor, ...]],
    optimizer: torch.optim.Optimizer,
) -> None:
    model.train()
    scaler = torch.amp.GradScaler("cpu", enabled=args.amp, init_scale=2.0**10)
    for step, (images, labels) in enumerate(loader, 1):
        accumulates = step % args.accumulation != 0
        with model.no_sync() if accumulates and isinstance(model, DDP) else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(model(images), labels) / args.accumulation
            scaler.scale(loss).backward()
        if accumulates:
            continue
        if args.clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@torch.no_grad()
def correct(model: nn.Module, dataset: TensorDataset) -> torch.Tensor:
    model.eval()
    images, labels = dataset[:]
    hits: torch.Tensor = (model(images).argmax(1) == labels).sum()
    return hits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--evaluate", choices=["all", "first"], default="all")
    parser.add_argument("--save", type=Path, required=True)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    train_set, test_set = data()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        train_set, num_replicas=world_size, rank=rank, shuffle=True
    )
    loader = DataLoader(train_set, batch_size=25, sampler=sampler)
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train(args, model, loader, optimizer)
        if args.evaluate == "all":
            total = correct(model, test_set)
            dist.all_reduce(total)
            dist.barrier()
            if rank == 0:
                print(f"epoch {epoch}: accuracy {int(total) / world_size / len(test_set):.3f}", flush=True)
        else:
            print(f"rank {rank}: epoch {epoch}", flush=True)
            if rank == 0:
                print(
                    f"epoch {epoch}: accuracy {int(correct(model, test_set)) / len(test_set):.3f}", flush=True
                )
    if rank == 0:
        torch.save(model.module.state_dict(), args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
