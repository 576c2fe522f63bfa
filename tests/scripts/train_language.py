"""A small language model, trained as most are: parts may go unused, gradients accumulate, are clipped or scaled."""

from __future__ import annotations

import argparse
import json
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_  # by name, as scripts do

WORDS, WIDTH, LENGTH = 50, 24, 8


class Model(nn.Module):
    """``spare`` is never used, ``side`` on rank 0 alone."""

    def __init__(self, *, parts: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        if parts:
            self.spare, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.out = nn.Linear(WIDTH, WORDS)
        self.parts = parts

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens)
        if self.parts and dist.get_rank() == 0:
            hidden = hidden + self.side(hidden)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        logits: torch.Tensor = self.out(hidden[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--find-unused", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--clip", type=float)
    parser.add_argument("--scale", action="store_true")
    parser.add_argument("--losses", type=Path)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(
        Model(parts=arguments.find_unused),
        find_unused_parameters=arguments.find_unused,
        bucket_cap_mb=0.005,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=arguments.scale)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(arguments.steps):
        for number in range(arguments.accumulate):
            last = number == arguments.accumulate - 1
            with nullcontext() if last else model.no_sync():
                loss = model(torch.randint(WORDS, (16, LENGTH), generator=data))
                scaler.scale(loss).backward()
        if arguments.clip is not None:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), arguments.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    if arguments.losses and os.environ["RANK"] == "0":
        checksum = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
        arguments.losses.write_text(json.dumps({"losses": losses, "checksum": checksum}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
