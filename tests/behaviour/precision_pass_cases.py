"""Ranks that compute under autocast, by a plan, and a single process that does what they do together."""

from __future__ import annotations

import torch
from tests.behaviour.pass_cases import STRATEGIES, model, momentum, parameters_of, train, trained_alone

from headway.passes.precision import Precision


def alone(world_size: int, *, lower: bool) -> list[float]:
    """Parameters after a single process has trained on the batches of all ranks."""
    one = model(plain=True).float()

    def forward(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(batch.device.type, dtype=torch.bfloat16, enabled=lower):
            out: torch.Tensor = one(batch)
        return out.float()

    return trained_alone(one, world_size, forward)


def trained(rank: int, world_size: int) -> dict[str, list[float]]:
    """Parameters after some steps under each strategy, and of the single process in both precisions."""
    found = {"alone": alone(world_size, lower=True), "float32": alone(world_size, lower=False)}
    for name, strategy in STRATEGIES.items():
        inner = model(plain=True).float()
        train(inner, momentum(inner.parameters()), strategy, rank, world_size, Precision(dtype="bfloat16"))
        found[name] = parameters_of(inner)
    return found
