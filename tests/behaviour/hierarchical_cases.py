"""Ranks of the tests of training under plans with hierarchical collectives and with others of our own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.behaviour.parameter_server_cases import STEPS, loss_of, net, optimizer_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import headway
from headway.collectives.algorithms import HIERARCHICAL
from headway.collectives.selection import SizeClass
from headway.errors import PlanError
from headway.integrations.parallelize import parallelize
from headway.plan import Plan
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.live.module_spec import model_spec


def _plan(model: nn.Module, algorithm: str, **options: Any) -> Plan:
    strategy = DecoupledStrategy(
        bucket_cap_bytes=700, reduce_scatter=algorithm, all_gather=algorithm, **options
    )
    return Plan.data_parallel(strategy, dist.get_world_size(), model_spec(model))


def _trained(model: nn.Module, wrapped: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Any:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapped, step, rank).backward()
        optimizer.step()
    return [p.detach().flatten().tolist() for p in model.parameters()]


SMALL = SizeClass(size_bytes=300, reduce_scatter="direct", all_gather="halving_doubling")
"""Two of the four buckets are no larger."""


def trains(
    rank: int,
    _world_size: int,
    places: str,
    algorithm: str = HIERARCHICAL,
    by_size: Sequence[dict[str, Any]] = (),
    ring_order: Sequence[int] = (),
) -> dict[str, Any]:
    """What a model has become under each form of the plan, and under stock DDP, on hosts that have a letter each."""
    os.environ["HEADWAY_HOST"] = places[rank]
    stock = net()
    found = {"ddp": _trained(stock, DistributedDataParallel(stock), optimizer_of(stock), rank)}
    for gather in ("gradients", "parameters"):
        for channels in (1, 2):
            model = net()
            optimizer = optimizer_of(model)
            options = {"gather": gather, "channels": channels, "by_size": by_size, "ring_order": ring_order}
            wrapped: Any = parallelize(model, optimizer, _plan(model, algorithm, **options))
            _trained(model, wrapped, optimizer, rank)
            wrapped.flush()
            found[f"{gather} {channels}"] = [p.detach().flatten().tolist() for p in model.parameters()]
    return found


def is_refused(
    rank: int, _world_size: int, places: str, algorithm: str = HIERARCHICAL, ring_order: Sequence[int] = ()
) -> str:
    """What the plan raises, or nothing."""
    os.environ["HEADWAY_HOST"] = places[rank]
    model = net()
    try:
        parallelize(model, optimizer_of(model), _plan(model, algorithm, ring_order=ring_order))
    except PlanError as error:
        return str(error)
    return ""


def recorded(
    rank: int,
    _world_size: int,
    places: str,
    folder: str,
    algorithm: str = HIERARCHICAL,
    by_size: Sequence[dict[str, Any]] = (),
) -> None:
    """A recording of training under the plan."""
    os.environ["HEADWAY_HOST"] = places[rank]
    with headway.record(Path(folder) / "trace", first_step=1, stop_step=5):
        model = net()
        optimizer = optimizer_of(model)
        wrapped: Any = parallelize(
            model, optimizer, _plan(model, algorithm, gather="gradients", by_size=by_size)
        )
        _trained(model, wrapped, optimizer, rank)
        wrapped.flush()
