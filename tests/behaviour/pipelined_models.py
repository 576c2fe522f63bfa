"""The models that the tests of pipelined modules train, and their optimizers."""

from __future__ import annotations

from typing import Any

import torch
from tests.behaviour.pipelined_step import WIDTH
from torch import nn
from torch.utils.checkpoint import checkpoint


def layers(count: int = 6, seed: int = 0) -> nn.Sequential:
    """A plain model."""
    torch.manual_seed(seed)
    found: list[nn.Module] = []
    for _ in range(count // 2):
        found += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*found).double()


class Checkpointed(nn.Module):
    """Its activations are computed again in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return found


def tied() -> nn.Sequential:
    model = layers(8)
    model[6].weight = model[0].weight
    return model


def tied_thrice() -> nn.Sequential:
    model = tied()
    model[4].weight = model[0].weight
    return model


def frozen() -> nn.Sequential:
    model = layers(8)
    model[2].requires_grad_(False)
    return model


def frozen_to_begin_with() -> nn.Sequential:
    """Nothing of the first stage is trained."""
    model = layers(8)
    for number in range(4):
        model[number].requires_grad_(False)
    return model


def frozen_in_the_middle() -> nn.Sequential:
    """Nothing of the second stage is trained."""
    model = layers(8)
    model[2].requires_grad_(False)
    return model


def normed_by_batch() -> nn.Sequential:
    model = layers()
    model.insert(1, nn.BatchNorm1d(WIDTH).double())
    model.insert(5, nn.BatchNorm1d(WIDTH).double())
    return model


class Scaled(nn.Module):
    """Has a buffer that it uses, and one that it counts in."""

    scale: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and x.device.type == "cpu":
            self.seen += len(x)
        return x * self.scale


def with_buffers() -> nn.Sequential:
    model = layers()
    model.insert(3, Scaled())
    return model


def normed() -> nn.Sequential:
    model = layers()
    model.insert(2, nn.LayerNorm(WIDTH).double())
    return model


def checkpointed() -> nn.Sequential:
    model = layers()
    return nn.Sequential(Checkpointed(model[:2]), Checkpointed(model[2:4]), model[4:])


def single_floats() -> nn.Sequential:
    return layers().float()


def working_in_place() -> nn.Sequential:
    """Every other module changes what it is given."""
    model = layers(8)
    for number in range(1, 8, 2):
        model[number] = nn.ReLU(inplace=True)
    return model


# Optimizers -----------------------------------------------------------------------------------------------


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def by_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups: biases without weight decay."""
    weights = [each for each in model.parameters() if each.dim() > 1]
    biases = [each for each in model.parameters() if each.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.01}]
    return torch.optim.AdamW(groups, lr=0.02)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, momentum=0.9, nesterov=True)
