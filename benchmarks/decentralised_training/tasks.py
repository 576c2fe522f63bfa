"""What the cases of losses train: models, their data and their optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from headway.demo.train_digits import convolutional_net
from headway.demo.train_gpt import CONTEXT, GPT, Sources

DIGITS_WIDTH, DIGITS_BATCH = 16, 16
GPT_WIDTH, GPT_DEPTH, GPT_BATCH = 64, 2, 8
HELD_OUT = 360  # digits nobody trains on; of text as many windows
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """A model, its data and its optimizer: ``batch(rank, seed, iteration)`` is what a rank trains on."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]
    held_out: Batch
    optimizer: Callable[[nn.Module, float], Optimizer]  # with this learning rate
    samples: int


def digits() -> Task:
    """A convolutional net on scikit-learn's digits."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    order = torch.randperm(len(loaded.target), generator=torch.Generator().manual_seed(0))
    images = (torch.tensor(loaded.images, dtype=torch.float32).unsqueeze(1) / 16)[order]
    labels = torch.tensor(loaded.target)[order]
    trained = len(labels) - HELD_OUT

    def batch(rank: int, seed: int, iteration: int) -> Batch:
        draw = torch.Generator().manual_seed(1_000_003 * seed + 10_007 * rank + iteration)
        chosen = torch.randint(trained, (DIGITS_BATCH,), generator=draw)
        return images[chosen], labels[chosen]

    return Task(
        lambda: convolutional_net(DIGITS_WIDTH), batch, (images[trained:], labels[trained:]),
        lambda module, rate: torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9), DIGITS_BATCH,
    )  # fmt: skip


def gpt() -> Task:
    """A small GPT on the standard library's sources."""
    windows: dict[tuple[int, int], Sources] = {}

    def batch(rank: int, seed: int, iteration: int) -> Batch:
        own = windows.setdefault((rank, seed), Sources(100 * seed + rank, 4096 * GPT_BATCH))
        rows = [own[(iteration * GPT_BATCH + each) % len(own)] for each in range(GPT_BATCH)]
        window = torch.stack(rows)
        return window[:, :-1], window[:, 1:]

    others = Sources(-1, HELD_OUT // 4)
    window = torch.stack([others[each] for each in range(len(others))])
    return Task(
        lambda: GPT(GPT_WIDTH, GPT_DEPTH), batch, (window[:, :-1], window[:, 1:]),
        lambda module, rate: torch.optim.AdamW(module.parameters(), lr=rate), GPT_BATCH * CONTEXT,
    )  # fmt: skip


TASKS = {"digits": digits, "gpt": gpt}


def loss_of(module: nn.Module, batch: Batch) -> torch.Tensor:
    """The cross entropy of a batch, a class a digit or a byte."""
    output = module(batch[0])
    return cross_entropy(output.flatten(0, -2), batch[1].flatten())


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """All parameters, and the buffers that are statistics."""
    return [*module.parameters(), *(each for each in module.buffers() if each.is_floating_point())]


def held_out_loss(task: Task, values: list[torch.Tensor]) -> float:
    """The loss, on data held out, of a model that has these ``values`` for its ``tensors_of``."""
    module = task.make()
    with torch.no_grad():
        for tensor, value in zip(tensors_of(module), values, strict=True):
            tensor.copy_(value)
        module.eval()
        return float(loss_of(module, task.held_out))
