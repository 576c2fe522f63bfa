"""What is trained: models of different proportions of parameters to activations, and the plans that train them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from headway.demo.train_gpt import CONTEXT, GPT
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.parameter_server.policy import ParameterServerStrategy

BASE_WORKERS = 2
CAP_MB = 5

PLANS: dict[str, Strategy] = {
    "ddp": DistributedDataParallelStrategy(),
    "decoupled-parameters": DecoupledStrategy(bucket_cap_bytes=CAP_MB * 2**20, channels=1),
    "decoupled-gradients": DecoupledStrategy(bucket_cap_bytes=CAP_MB * 2**20, channels=1, gather="gradients"),
    "servers": ParameterServerStrategy(bucket_cap_mb=CAP_MB, channels=1),
}


class Loss(nn.Module):
    """A model with the cross entropy of what it says, so that it returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Classes are the last dimension of what the model puts out."""
        return cross_entropy(self.model(inputs).flatten(0, -2), labels.flatten())


class Residual(nn.Module):
    """Two convolutions with batch norm and a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(channels, out, 1, stride, bias=False)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: (batch, channels, height, width)."""
        out: torch.Tensor = self.activation(self.body(x) + self.shortcut(x))
        return out


Made = tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]


def convolutional() -> Made:
    """A residual net: large activations, few parameters."""
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
        Residual(64, 64, 1), Residual(64, 128, 2), Residual(128, 256, 2), Residual(256, 512, 2),
        Residual(512, 512, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 100),
    )  # fmt: skip
    return Loss(model), (torch.zeros(32, 3, 64, 64), torch.zeros(32, dtype=torch.long))


def transformer() -> Made:
    """A language model of bytes: as many activations as parameters, about."""
    tokens = torch.zeros(4, CONTEXT, dtype=torch.long)
    return Loss(GPT(width=512, depth=6, heads=8)), (tokens, tokens)


def dense() -> Made:
    """Dense layers: large parameters, few activations."""
    sizes = (1024, 4096, 4096, 2048, 100)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return Loss(nn.Sequential(*layers[:-1])), (torch.zeros(64, 1024), torch.zeros(64, dtype=torch.long))


@dataclass(frozen=True)
class Subject:
    """``make`` gives the model and a batch; ``optimizer`` is its name for ``headway predict``."""

    make: Callable[[], Made]
    optimizer: str

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer, which updates all at once, as on accelerators."""
        if self.optimizer == "adam":
            return torch.optim.Adam(model.parameters(), lr=1e-5, foreach=True)
        momentum = 0.9 if self.optimizer == "momentum" else 0.0
        return torch.optim.SGD(model.parameters(), lr=1e-5, momentum=momentum, foreach=True)


SUBJECTS = {
    "convolutional-momentum": Subject(convolutional, "momentum"),
    "transformer-adam": Subject(transformer, "adam"),
    "dense-adam": Subject(dense, "adam"),
}
