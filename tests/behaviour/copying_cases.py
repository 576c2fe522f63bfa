"""Ranks of the test that a wrapped model is copied and saved as stock DistributedDataParallel is."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from headway.integrations.parallelize import finish, parallelize
from headway.strategies.base import PIPELINE
from headway.strategies.registry import names, policy_named

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ddp": [{}, {"wire": [{"codec": "int8"}]}, {"wire": [{"dtype": "bfloat16"}]}],
    "decoupled": [{}],
    "local-sgd": [{"steps": 2}],
    "partial-all-reduce": [{"groups": "static"}, {"groups": "all"}],
}
"""Of strategies that are to be tried in several ways, or have options that they need here."""


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 2))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def under_every_strategy(rank: int, _world_size: int) -> list[str]:
    """What copies under every strategy that wraps models lack; nothing where all is right."""
    wrong = []
    for name in names():
        if policy_named(name).dimension == PIPELINE:  # its models are stages
            continue
        for options in OPTIONS.get(name, [{}]):
            wrong += [f"rank {rank}, {name} {options}: {what}" for what in copied_under(name, options, rank)]
    return wrong


def copied_under(name: str, options: dict[str, Any], rank: int) -> list[str]:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = parallelize(module, optimizer, policy_named(name)(**options))
    trained(model, optimizer, 0)
    wrong = []
    if rank == 0:  # alone, as checkpoints are written
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        averaged = AveragedModel(model)
        averaged.update_parameters(model)
        for how, copied in {
            "copied": copy.deepcopy(model), "saved": torch.load(saved, weights_only=False), "averaged": averaged.module,
        }.items():  # fmt: skip
            if not isinstance(copied, DistributedDataParallel):
                wrong.append(f"{how}: a {type(copied).__name__}")
            if any("_headway" in key for key in vars(copied)) or vars(copied).get("_comm_hooks"):
                wrong.append(f"{how}: not an ordinary one: {sorted(vars(copied))}")
            for (key, ours), (other, its) in zip(
                model.state_dict().items(), copied.state_dict().items(), strict=True
            ):
                if key != other or not torch.equal(ours, its):
                    wrong.append(f"{how}: {key} and {other} differ")
            with torch.no_grad():
                copied.module.eval()(torch.ones(2, 6))
    dist.barrier()
    trained(model, optimizer, 1)  # goes on
    if name == "ddp":
        another = copy.deepcopy(model)
        another(torch.full((2, 6), float(rank))).sum().backward()
        gradient = next(another.parameters()).grad
        assert gradient is not None
        mean = gradient.clone()
        dist.all_reduce(mean)
        if not torch.allclose(gradient, mean / dist.get_world_size()):
            wrong.append("a copy that all ranks train does not average its gradients")
    finish(model)
    return wrong
