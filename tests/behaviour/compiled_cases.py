"""Ranks that train compiled models: recorded, under the decoupled all-reduce, and as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import headway
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.ddp.runtime import wrap as wrap_stock
from headway.strategies.decoupled.wrapper import DecoupledDataParallel

STEPS = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Halves(nn.Module):
    """One half compiled, the other not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Net(), torch.compile(Net(), backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


def build(how: str, wrap: Any = DistributedDataParallel) -> Any:
    torch.manual_seed(0)
    if how == "before":
        return wrap(torch.compile(Net(), backend="aot_eager", fullgraph=True))
    if how == "in part":
        return wrap(Halves())
    if how == "in place":
        net = Net()
        net.compile(backend="aot_eager")
        return wrap(net)
    wrapped = wrap(Net())
    if how == "in place, later":
        wrapped.module.compile(backend="aot_eager")
        return wrapped
    return torch.compile(wrapped, backend="aot_eager")


def train(model: Any, rank: int, *, clear_late: bool = False) -> dict[str, Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, compiled = [], []
    for step in range(STEPS):
        if not clear_late:
            optimizer.zero_grad()
        loss = model(torch.full((4, 16), float(rank + step + 1))).square().mean()
        if clear_late:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        compiled.append(counters["stats"]["unique_graphs"])
        if step == 4:
            with torch.no_grad():
                losses.append(model(torch.ones(4, 16)).sum().item())
    return {"losses": losses, "compiled": compiled}


def recorded(rank: int, _world_size: int, folder: str) -> dict[str, Any]:
    """For each way to compile: what a job gives alone, and what it gives while it is recorded."""
    found = {}
    for how in ("before", "in part", "in place, later", "after", "after, watched"):
        for name in ("alone", "recorded"):
            torch._dynamo.reset()
            counters.clear()
            if name == "recorded" and how == "after":  # wrapped and compiled before recording begins
                model = build(how)
                with headway.record(Path(folder, how), model, first_step=3, stop_step=6):
                    found[how, name] = train(model, rank)
            elif name == "recorded":
                with headway.record(Path(folder, how), first_step=3, stop_step=6):
                    found[how, name] = train(build(how), rank)
            else:
                found[how, name] = train(build(how), rank)
    return {f"{how}, {name}": each for (how, name), each in found.items()}


def decoupled(rank: int, _world_size: int) -> dict[str, Any]:
    """Stock DDP and ours, where a script clears gradients early or late, with compiled models."""
    found = {}
    for how, late in (("before", False), ("before", True), ("in part", False)):
        for name, wrap in (("stock", DistributedDataParallel), ("ours", DecoupledDataParallel)):
            torch._dynamo.reset()
            counters.clear()
            options = {"bucket_cap_mb": 0.001} if name == "ours" else {}
            model = build(how, lambda net, wrap=wrap, options=options: wrap(net, **options))
            found[f"{how}, {late}, {name}"] = train(model, rank, clear_late=late)
    return found


def parts(_rank: int, _world_size: int) -> dict[str, int]:
    """How many graphs a model of three megabytes becomes: inside DDP, ours, DDP with a plan's caps, and alone."""
    found = {}
    small = DistributedDataParallelStrategy(bucket_cap_mb=0.25)
    wrappers: dict[str, Any] = {
        "stock": DistributedDataParallel,
        "ours": DecoupledDataParallel,
        "planned": lambda model, **options: wrap_stock(model, small, **options),
        "alone": None,
    }
    for name, wrap in wrappers.items():
        torch._dynamo.reset()
        graphs = 0

        def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
            nonlocal graphs
            graphs += 1
            return graph.forward

        model: Any = torch.compile(nn.Sequential(*(nn.Linear(512, 512) for _ in range(3))), backend=backend)
        if wrap is not None:
            model = wrap(model, bucket_cap_mb=1)
        model(torch.ones(2, 512)).sum().backward()
        found[name] = graphs
    return found
