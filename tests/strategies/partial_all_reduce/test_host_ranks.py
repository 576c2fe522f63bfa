"""A rank of a host that is not its first: what it knows of what is averaged has to be what the first one knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headway.strategies.partial_all_reduce.host_ranks import HostFollower, HostReport


class NothingHandedDown:
    """A first rank whose groups never take a mean."""

    def hear(self, _word: Any, _layout: Any, iteration: int = 0) -> HostReport:
        return HostReport(iteration, is_common=False)


def rank_of(module: nn.Module) -> tuple[HostFollower, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return HostFollower(module, optimizer, down=NothingHandedDown(), moments="local"), optimizer  # type: ignore[arg-type]


def net(*, frozen: bool = False) -> nn.Sequential:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(not frozen)
    return module


def test_what_was_averaged_before_it_was_frozen_still_is_and_outlives_a_checkpoint() -> None:
    module = net()
    rank, optimizer = rank_of(module)
    for _ in range(2):
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        module[0].requires_grad_(False)
    every = {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert rank._layout().parameters == every
    saved = rank.checkpoint()
    rank.close()

    again, _ = rank_of(net(frozen=True))
    again.restore(saved)
    assert again._layout().parameters == every
    again.close()
