"""Ranks that train under each strategy for CUDA tensors, and what they come to."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tests.behaviour.pass_cases import model, momentum, parameters_of, train
from torch import nn

import headway
from headway.errors import HeadwayError
from headway.strategies.base import Strategy

STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "decoupled": ("decoupled", {"bucket_cap_bytes": 600}),
    "local SGD": ("local-sgd", {"steps": 2}),
    "partial all-reduce": ("partial-all-reduce", {"groups": "static"}),
    "parameter server": ("parameter_server", {}),
    "cast to bfloat16": ("ddp", {"wire": [{"codec": "cast", "dtype": "bfloat16"}]}),
}


def trained(rank: int, world_size: int) -> dict[str, list[float] | str]:
    """Parameters after some steps of each strategy, the last one averaged; or why there are none."""
    found: dict[str, list[float] | str] = {}
    for name, (strategy, options) in STRATEGIES.items():
        try:
            found[name] = _trained(headway.strategy(strategy, **options), rank, world_size)
        except HeadwayError as error:
            found[name] = str(error)
    return found


def _trained(strategy: Strategy, rank: int, world_size: int) -> list[float]:
    inner = model(plain=True)
    train(inner, momentum(inner.parameters()), strategy, rank, world_size)
    own = torch.tensor(parameters_of(inner), dtype=torch.float64, device="cpu")
    dist.all_reduce(own)
    result: list[float] = (own / world_size).tolist()
    return result


def pipelined(rank: int, world_size: int) -> str:
    """Why a model is not trained as a pipeline."""
    del rank, world_size
    inner = model(plain=True)
    optimizer = momentum(inner.parameters())
    planned = headway.strategy("pipeline", micro_batches=4)
    try:
        headway.parallelize(inner, optimizer, planned, loss_fn=nn.functional.mse_loss)
    except HeadwayError as error:
        return str(error)
    return ""
