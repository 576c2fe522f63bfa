"""A small job whose workers average in groups, and its reference: the same steps and mixing matrices in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

RATE, MOMENTUM = 0.05, 0.9
FEATURES = 6


def model(width: int = 8) -> nn.Module:
    torch.manual_seed(7)
    layers = nn.Sequential(nn.Linear(FEATURES, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 3))
    return layers.double()


def rows(worker: int, iteration: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + iteration)
    inputs = torch.randn(5, FEATURES, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(5, 3, generator=generator, dtype=torch.float64)


def loss(module: nn.Module, worker: int, iteration: int) -> torch.Tensor:
    inputs, targets = rows(worker, iteration)
    return nn.functional.mse_loss(module(inputs), targets)


def values(module: nn.Module) -> list[float]:
    found = [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]
    return [float(x) for tensor in found for x in tensor.detach().reshape(-1)]


class Reference:
    """One worker of the reference, with SGD written out."""

    def __init__(self, worker: int, *, average_moments: bool, average_buffers: bool) -> None:
        self.worker, self.iteration = worker, 0
        self.module = model()
        self.momenta = [torch.zeros_like(p) for p in self.module.parameters()]
        self.late: list[tuple[int, list[torch.Tensor]]] = []
        self._average_moments, self._average_buffers = average_moments, average_buffers

    @property
    def mixed(self) -> list[torch.Tensor]:
        """What is averaged, live."""
        return [
            *(p.detach() for p in self.module.parameters()),
            *(b for b in self.module.buffers() if self._average_buffers and b.is_floating_point()),
            *(self.momenta if self._average_moments else ()),
        ]

    def gradients(self) -> Sequence[torch.Tensor]:
        """Of the next step."""
        own = loss(self.module, self.worker, self.iteration)
        return torch.autograd.grad(own, list(self.module.parameters()))

    def advance(self, to_iteration: int) -> None:
        """Make steps up to that one, and take what is due after each."""
        while self.iteration < to_iteration:
            parameters = list(self.module.parameters())
            gradients = self.gradients()
            with torch.no_grad():
                for parameter, momentum, gradient in zip(parameters, self.momenta, gradients, strict=True):
                    momentum.mul_(MOMENTUM).add_(gradient)
                    parameter.sub_(RATE * momentum)
            self.iteration += 1
            for due, change in self.late:
                if due == self.iteration:
                    self.add(change)

    def add(self, change: Sequence[torch.Tensor]) -> None:
        for tensor, part in zip(self.mixed, change, strict=True):
            tensor.add_(part)


def reference(
    world_size: int,
    rounds: Sequence[Sequence[Mapping[str, Any]]],
    steps: int | Sequence[int],
    *,
    moments: str,
    buffers: str,
    one: Callable[..., Reference] = Reference,
) -> list[list[float]]:
    """What each worker ends with, by the groups that committed in ``rounds`` (of each worker), in their order.

    ``one`` makes a worker.
    """
    workers = [
        one(w, average_moments=moments == "averaged", average_buffers=buffers == "averaged")
        for w in range(world_size)
    ]
    committed: dict[int, dict[int, Mapping[str, Any]]] = {}
    for worker, all_of_it in enumerate(rounds):
        for each in all_of_it:
            if each["ending"] == "committed":
                committed.setdefault(each["number"], {})[worker] = each
    for number in sorted(committed):
        group = committed[number]
        assert all(tuple(each["members"]) == tuple(sorted(group)) for each in group.values())
        for worker, each in group.items():
            workers[worker].advance(each["iteration"])
        had = [[tensor.clone() for tensor in workers[worker].mixed] for worker in sorted(group)]
        mean = [torch.stack(parts).mean(0) for parts in zip(*had, strict=True)]
        for (worker, each), own in zip(sorted(group.items()), had, strict=True):
            change = [common - before for common, before in zip(mean, own, strict=True)]
            if each["staleness"]:
                workers[worker].late.append((each["iteration"] + each["staleness"], change))
            else:
                workers[worker].add(change)
    made = [steps] * world_size if isinstance(steps, int) else steps
    for ended, count in zip(workers, made, strict=True):
        ended.advance(count)
    return [values(ended.module) for ended in workers]
