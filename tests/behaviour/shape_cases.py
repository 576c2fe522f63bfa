"""Ranks that train two wrapped models, or one that is sharded without a wrapper."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import headway


class Critic(nn.Sequential):
    """The smaller one."""


class Generator(nn.Sequential):
    """The larger one."""


def two_models(rank: int, _world_size: int, folder: str) -> list[str]:
    """A critic that is wrapped first and steps three times an iteration, and a generator."""
    with (
        warnings.catch_warnings(record=True) as warned,
        headway.record(Path(folder, "two"), first_step=2, stop_step=5),
    ):
        warnings.simplefilter("always")
        critic = DistributedDataParallel(Critic(nn.Linear(8, 1)))
        generator = DistributedDataParallel(Generator(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)))
        critics, generators = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (critic, generator))
        for _ in range(7):
            for _ in range(3):
                critics.zero_grad()
                critic(generator(torch.ones(2, 4)).detach()).mean().backward()
                critics.step()
            generators.zero_grad()
            critic(generator(torch.ones(2, 4))).mean().backward()
            generators.step()
    return [str(one.message) for one in warned if issubclass(one.category, headway.errors.HeadwayWarning)]


def sharded(rank: int, _world_size: int, folder: str) -> None:
    """A model under FSDP2."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))
    for block in net:
        fully_shard(block)
    fully_shard(net)
    optimizer = torch.optim.Adam(net.parameters())
    with headway.record(Path(folder, "sharded"), first_step=2, stop_step=5):
        for _ in range(6):
            optimizer.zero_grad()
            net(torch.ones(4, 64)).square().mean().backward()
            optimizer.step()
