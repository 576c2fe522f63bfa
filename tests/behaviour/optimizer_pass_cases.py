"""Ranks whose optimizer is another implementation, by a plan."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tests.behaviour.pass_cases import STRATEGIES, trained

from headway.passes.optimizer import IMPLEMENTATIONS, OptimizerImplementation


def switched(rank: int, world_size: int) -> dict[str, Any]:
    """For each strategy, sums of parameters and options of the optimizer without the pass and with each of them."""
    passes = [(), *((OptimizerImplementation(implementation=each),) for each in IMPLEMENTATIONS)]
    found: dict[str, Any] = {}
    for name, strategy in STRATEGIES.items():
        found[name] = []
        for own in passes:
            adam = partial(torch.optim.AdamW, lr=0.05)
            sums, optimizer = trained(strategy, rank, world_size, own, plain=True, optimizer_of=adam)
            found[name].append((sums, [optimizer.param_groups[0][each] for each in IMPLEMENTATIONS]))
    return found
