"""A data-parallel job with something planted in it.

Layers hold the step for a planned time asleep (so that four ranks fit two cores) and have real parameters and
gradients; collectives are real Gloo over whatever links the lab gives. Or, for ranks that have a core each, layers
compute. ``PLANT`` (JSON in the environment) says what is planted.
"""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


@dataclass
class Plant:
    """What the job does. Times are seconds a step; ``slow`` maps a part to (rank, extra seconds)."""

    steps: int = 26
    layers: int = 6
    numel: int = 50_000  # of a layer
    first_numel: int = 0  # of one more layer in front
    forward_s: float = 0.004  # of a layer
    backward_s: float = 0.008
    input_s: float = 0.001
    bucket_mb: float = 0.25
    slow: dict[str, tuple[int, float]] = field(default_factory=dict)
    pieces: int = 1  # parameters of a layer
    by_hand: bool = False  # gradients are all-reduced after backward
    blocking_numel: int = 0  # all-reduced on the spot between forward and backward
    moving_s: float = 0.0  # one rank, another each step, takes longer
    stall_rank: int = 0
    stall_s: float = 0.0
    stall_every: int = 0
    computing: int = 0  # width of layers that compute; none is paced then


class Paced(torch.autograd.Function):
    """Sleeps in forward and in backward; gradients are ones."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        time.sleep(layer.forward_s)
        ctx.layer, ctx.shapes = layer, [p.shape for p in parameters]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        time.sleep(ctx.layer.backward_s)
        return (None, gradients[0], *(torch.ones(shape) for shape in ctx.shapes))


class Layer(nn.Module):
    """One paced layer."""

    def __init__(self, numel: int, pieces: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(numel // pieces)) for _ in range(pieces)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Paced.apply(self, x, *self.weights)  # type: ignore[no-untyped-call]
        return out


class Computing(nn.Module):
    """Layers that keep a core busy: transformers over 8 rows of 64 positions."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(1, width)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
                for _ in range(layers)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(self.first(x.reshape(1, 1, 1).expand(8, 64, 1)))
        return out


class Samples(Dataset[torch.Tensor]):
    """One sample a step, which takes a while."""

    def __init__(self, count: int, seconds: float) -> None:
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.ones(1, requires_grad=True)


def main() -> None:
    plant = Plant(**json.loads(os.environ.get("PLANT", "{}")))
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()

    def extra(part: str) -> float:
        slow_rank, seconds = plant.slow.get(part, (-1, 0.0))
        return seconds if slow_rank == rank else 0.0

    def layer(numel: int) -> Layer:
        each = plant.layers + bool(plant.first_numel)
        return Layer(
            numel,
            plant.pieces,
            plant.forward_s + extra("forward") / each,
            plant.backward_s + extra("backward") / each,
        )

    sizes = [plant.first_numel] * bool(plant.first_numel) + [plant.numel] * plant.layers
    paced = nn.Sequential(*(layer(size) for size in sizes))
    module = Computing(plant.computing, plant.layers) if plant.computing else paced
    model = DistributedDataParallel(module, bucket_cap_mb=plant.bucket_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    chance = random.Random(0)  # the same on every rank
    for step, x in enumerate(DataLoader(Samples(plant.steps, plant.input_s + extra("input")), batch_size=1)):
        loss = model(x).sum()
        if plant.blocking_numel:
            dist.all_reduce(torch.ones(plant.blocking_numel))
        if chance.randrange(dist.get_world_size()) == rank:
            time.sleep(plant.moving_s)
        if plant.by_hand:
            _backward_by_hand(model, loss)
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if plant.stall_every and step % plant.stall_every == 0 and rank == plant.stall_rank:
            time.sleep(plant.stall_s)
    dist.destroy_process_group()


def _backward_by_hand(model: DistributedDataParallel, loss: torch.Tensor) -> None:
    with model.no_sync():
        loss.backward()
    works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
    for work in works:
        work.wait()


if __name__ == "__main__":
    main()
